"""Steps for clients are taken a few in each turn of the event loop, a holder after the other."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from triptych.proxy.turns.loop_turns import LoopTurns


async def loop_turn() -> None:
    await asyncio.sleep(0)


async def test_a_step_is_taken_at_once_while_few_are_asked_for():
    turns, taken = LoopTurns(steps=2, burst=0), []
    turns.ask("a", partial(taken.append, 1))
    assert taken == [1]


async def test_no_turn_of_the_loop_has_more_than_its_steps():
    turns, taken = LoopTurns(steps=2, burst=0), []
    for number in range(7):
        turns.ask("a", partial(taken.append, number))
    counts = [len(taken)]
    while len(taken) < 7:
        await loop_turn()
        counts.append(len(taken))
    assert taken == list(range(7))
    assert counts == [2, 4, 6, 7]


async def test_a_crowd_is_served_in_one_turn_of_the_loop_and_a_flood_only_once():
    turns, taken = LoopTurns(steps=1, burst=30), []
    for number in range(31):
        turns.ask("one", partial(taken.append, number))
    assert len(taken) == 31
    await loop_turn()  # nothing waits
    for number in range(1000):
        turns.ask("one", partial(taken.append, number))
    assert len(taken) == 62
    for further in range(1, 4):
        await loop_turn()
        assert len(taken) == 62 + further


async def test_beside_another_holder_a_crowd_is_not_served_in_one_turn_of_the_loop():
    turns, taken = LoopTurns(steps=2, burst=1000), []
    turns.ask("one", partial(taken.append, "one"))
    await loop_turn()
    for number in range(100):
        turns.ask("crowd", partial(taken.append, number))
    assert taken == ["one", 0, 1]
    await loop_turn()
    assert taken == ["one", 0, 1, 2, 3]


async def test_whoever_comes_later_with_one_step_is_next_however_many_wait_of_another_holder():
    turns, taken = LoopTurns(steps=1, burst=0), []
    for number in range(1000):
        turns.ask("many", partial(taken.append, number))
    turns.ask("one", partial(taken.append, "one"))
    await loop_turn()
    await loop_turn()
    assert "one" in taken
    assert len(taken) == 3


async def test_a_step_that_asks_for_a_further_one_lets_others_pass():
    turns, taken = LoopTurns(steps=1, burst=0), []

    def again() -> None:
        taken.append("again")
        if len(taken) < 20:
            turns.ask("a", again)

    turns.ask("a", again)
    turns.ask("b", partial(taken.append, "b"))
    await loop_turn()
    await loop_turn()
    assert "b" in taken[:3]


async def test_a_step_that_fails_keeps_no_other_one():
    turns, taken = LoopTurns(steps=1, burst=0), []
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))

    def fail() -> None:
        raise ValueError

    turns.ask("a", partial(taken.append, 0))
    turns.ask("a", fail)
    turns.ask("a", partial(taken.append, 1))
    for _ in range(3):
        await loop_turn()
    assert taken == [0, 1]
    assert [type(error) for error in told] == [ValueError]


async def test_a_turn_that_is_waited_for_comes_after_one_of_each_other_holder():
    turns, had = LoopTurns(steps=1, burst=0), []

    async def begin(holder: str) -> None:
        await turns.turn(holder)
        had.append(holder)

    async with asyncio.TaskGroup() as group:
        for _ in range(200):
            group.create_task(begin("many"))
        group.create_task(begin("one"))
    assert had.index("one") < 4
    assert len(had) == 201


async def test_a_turn_that_nobody_is_before_takes_none_of_the_loops():
    turns = LoopTurns(steps=2, burst=0)
    waiting = turns.turn("a")
    with pytest.raises(StopIteration):
        waiting.send(None)


async def test_who_gives_up_waiting_for_a_turn_keeps_no_other_one():
    turns = LoopTurns(steps=1, burst=0)
    tasks = [asyncio.create_task(turns.turn("a")) for _ in range(4)]
    await loop_turn()
    tasks[2].cancel()
    await tasks[3]
    assert [task.cancelled() for task in tasks] == [False, False, True, False]

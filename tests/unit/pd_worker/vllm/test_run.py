"""Places are given in order, and come back however a wait ends."""

from __future__ import annotations

import asyncio

import pytest

from triptych.pd_worker.vllm.attempt import Diverged, Replay
from triptych.pd_worker.vllm.run import MAX_FAILURES, BatchPlaces, EmbeddingRoom, Retries


def order(arrival: float, *, resumed: bool = False) -> tuple[bool, float, str]:
    return (not resumed, arrival, f"r{arrival}")


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_start_in_order_and_resumed_ones_first():
    places, started = BatchPlaces(1), []

    async def work(name: str, at: tuple[bool, float, str]) -> None:
        async with places.place(at):
            started.append(name)
            await asyncio.sleep(0)

    async with places.place(order(0.0)):
        tasks = [
            asyncio.create_task(work(name, at))
            for name, at in (
                ("late", order(3.0)),
                ("early", order(1.0)),
                ("resumed", order(9.0, resumed=True)),
            )
        ]
        await settled()
        assert started == []
    await asyncio.gather(*tasks)
    assert started == ["resumed", "early", "late"]


async def test_a_wait_cancelled_after_its_turn_came_gives_the_place_back():
    places = BatchPlaces(1)

    async def work() -> None:
        async with places.place(order(1.0)):
            raise AssertionError("it was cancelled")

    async with places.place(order(0.0)):
        task = asyncio.create_task(work())
        await settled()
    # The place is the task's now, which has not run since.
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5), places.place(order(2.0)):
        pass


async def test_bytes_are_reserved_together_in_order_and_shared_by_key():
    room = EmbeddingRoom(100)
    await room.reserve("a", order(0.0), {"x": 60})
    await room.reserve("b", order(1.0), {"x": 60})
    assert room.reserved == 60
    big = asyncio.create_task(room.reserve("c", order(2.0), {"y": 60}))
    small = asyncio.create_task(room.reserve("d", order(3.0), {"z": 10}))
    await settled()
    assert not big.done() and not small.done()
    room.release("a")
    await settled()
    assert not big.done()
    room.release("b")
    await asyncio.gather(big, small)
    assert room.reserved == 70


def test_failures_in_a_row_end_a_request():
    retries = Retries()
    pauses = [retries.pause(busy=False) for _ in range(MAX_FAILURES)]
    assert pauses == [0.1, 0.2, 0.4, None]


def test_a_request_that_comes_further_has_all_its_tries_again():
    retries = Retries()
    for _ in range(MAX_FAILURES - 1):
        retries.pause(busy=False)
    retries.reset()
    assert retries.pause(busy=False) == 0.1


def test_a_busy_server_is_asked_ever_more_rarely_and_never_given_up():
    retries = Retries()
    pauses = [retries.pause(busy=True) for _ in range(100)]
    assert pauses[:6] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0] and set(pauses[5:]) == {2.0}
    assert retries.failures == 0


def test_known_tokens_are_dropped_and_later_ones_are_new():
    replay = Replay((5, 6))
    assert [replay.is_new(token) for token in (5, 6, 5)] == [False, False, True]


def test_another_token_than_before_is_a_divergence():
    replay = Replay((5, 6))
    replay.is_new(5)
    with pytest.raises(Diverged, match="output token 1 is 7, and was 6"):
        replay.is_new(7)

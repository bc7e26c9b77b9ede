"""Engines that die or stand still are seen, and end their process; those that only take long do not."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest

from support.beats import NoTimer, StandingLoop
from triptych.base.engine_beat import (
    HANG_FACTOR,
    MIN_LIMIT,
    SLOW_FACTOR,
    EngineBeat,
    Life,
    OwnPauses,
    StallClock,
    Watchdog,
    check_stall_timeout,
    judge,
)
from triptych.base.errors import ConfigError

LIMIT = 8.0


class Panic(BaseException):
    """What is no Exception, as pyo3's panics are."""


def watched(*names: str, limit: float = LIMIT) -> tuple[Watchdog, list[EngineBeat], queue.Queue[str]]:
    beats, ends = [EngineBeat(name) for name in names], queue.Queue[str]()
    return Watchdog(beats, limit, end=ends.put, timer=NoTimer()), beats, ends


@pytest.mark.parametrize(
    ("still", "life"),
    [(0.0, Life.FRESH), (3.9, Life.FRESH), (4.0, Life.STALE), (7.9, Life.STALE), (8.0, Life.STALLED)],
)
def test_an_engine_is_stale_at_half_of_its_limit_and_stalled_at_the_whole(still, life):
    assert judge(still, LIMIT) is life


def test_a_dead_engine_is_dead_however_fresh_its_last_beat():
    assert judge(0.0, LIMIT, dead=True) is Life.DEAD


def test_time_stands_still_only_while_the_count_does():
    clock = StallClock(1.0, LIMIT)
    assert [clock.poll(1, now) for now in (10.0, 11.0, 12.0)] == [0.0, 1.0, 2.0]
    assert clock.poll(2, 13.0) == 0.0
    assert clock.poll(1, 14.0) == 0.0, "a count that fell is another process's"


def test_a_watch_that_did_not_run_for_a_quarter_of_its_limit_starts_again_at_most_twice_in_a_row():
    clock, quarter = StallClock(1.0, LIMIT), LIMIT / 4
    clock.poll(1, 0.0)
    assert clock.poll(1, 1.0) == 1.0
    assert clock.poll(1, 1.9 + quarter) == 3.0, "late by less than a quarter: two looks count"
    assert clock.poll(1, 500.0) == 0.0
    assert clock.poll(1, 501.0) == 1.0, "a look in time is no sign of life"
    assert clock.poll(1, 1000.0) == 0.0
    assert clock.poll(1, 2000.0) == 2.0, "it was late twice before"
    assert clock.poll(1, 3000.0) == 4.0
    assert clock.poll(2, 4000.0) == 0.0
    assert clock.poll(2, 5000.0) == 0.0, "after a sign of life it may start again"


async def test_an_answer_that_a_standing_loop_has_not_read_is_waited_for_anew(monkeypatch):
    standing, asked = StandingLoop(monkeypatch), asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(OwnPauses(LIMIT).answers((asked,), LIMIT))
    await standing.turn(3)
    standing.stand_still(10 * LIMIT)
    await standing.turn(10)
    assert not waiting.done(), "it was judged by what nobody had read"
    asked.set_result(None)
    assert await waiting


async def test_a_loop_that_stands_still_again_and_again_ends_the_wait(monkeypatch):
    standing, asked = StandingLoop(monkeypatch), asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(OwnPauses(LIMIT).answers((asked,), LIMIT))
    for _ in range(3):
        assert not waiting.done()
        await standing.turn(3)
        standing.stand_still(10 * LIMIT)
        await standing.turn(10)
    assert not await waiting


async def test_an_answer_that_does_not_come_ends_the_wait_of_a_loop_that_turns(monkeypatch):
    standing, asked = StandingLoop(monkeypatch), asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(OwnPauses(LIMIT).answers((asked,), LIMIT))
    for _ in range(5):
        await standing.turn(5)
        standing.stand_still(LIMIT / 4)
        await standing.turn(10)
    assert not await waiting


def test_an_engine_that_stands_still_is_unhealthy_at_half_of_its_limit_and_ends_the_process_at_the_whole():
    watchdog, [beat], _ = watched("engine")
    seen = []
    for second in range(10):
        reason = watchdog.poll(float(second))
        seen.append((watchdog.healthy, reason))
    assert seen[:4] == [(True, "")] * 4
    assert seen[4:8] == [(False, "")] * 4
    assert seen[8] == (False, "the engine has stood still for 8 s")


def test_an_engine_that_moves_again_is_healthy_again():
    watchdog, [beat], _ = watched("engine")
    for second in range(7):
        assert not watchdog.poll(float(second))
    assert not watchdog.healthy
    beat.tick()
    assert not watchdog.poll(7.0)
    assert watchdog.healthy


def test_one_engine_of_two_that_stands_still_is_named():
    watchdog, [tower, decoder], _ = watched("tower", "decoder")
    for second in range(9):
        decoder.tick()
        reason = watchdog.poll(float(second))
    assert reason.startswith("the tower")


@pytest.mark.parametrize("inside", ["slow", "turn"])
def test_a_first_compile_and_the_wait_for_another_engine_have_a_longer_limit(inside):
    watchdog, [beat], _ = watched("engine")
    waiting: list[str] = []

    @contextmanager
    def late() -> Iterator[None]:
        waiting.extend(watchdog.poll(float(second)) for second in range(int(LIMIT * SLOW_FACTOR)))
        yield

    guard: AbstractContextManager[object] = beat.slow() if inside == "slow" else beat.turn(late())
    with guard:
        if inside == "slow":
            waiting.extend(watchdog.poll(float(second)) for second in range(int(LIMIT * SLOW_FACTOR)))
        else:
            assert not watchdog.poll(LIMIT * SLOW_FACTOR), "the time in the turn begins anew"
    assert waiting == [""] * int(LIMIT * SLOW_FACTOR)
    assert watchdog.poll(1000.0) == ""
    assert [bool(watchdog.poll(1000.0 + second)) for second in range(10)][-1]


def test_even_the_longer_limit_ends():
    watchdog, [beat], _ = watched("engine")
    with beat.slow():
        assert any(watchdog.poll(float(second)) for second in range(int(LIMIT * SLOW_FACTOR) + 1))


def test_a_turn_is_given_back_and_its_errors_come_through():
    beat, held = EngineBeat("engine"), threading.Lock()
    with pytest.raises(RuntimeError, match="inside"), beat.turn(held):
        assert held.locked()
        raise RuntimeError("inside")
    assert not held.locked()
    with beat.turn(nullcontext()):
        pass


@pytest.mark.parametrize("end", [Panic("a panic"), SystemExit(3), RuntimeError("a bug"), None])
def test_a_thread_that_ends_before_it_is_stopped_ends_the_process_at_once(end):
    # An hour is the limit: nobody waits for a stall.
    watchdog, [beat], ends = watched("engine", limit=3600.0)

    def loop() -> None:
        if end is not None:
            raise end

    watchdog.start()
    thread = threading.Thread(target=beat.run, args=(loop,))
    thread.start()
    assert ends.get(timeout=30) == "the engine is dead"
    assert not watchdog.healthy
    thread.join()
    watchdog.stop()


def test_a_thread_that_ends_after_it_was_stopped_is_no_death():
    watchdog, [beat], ends = watched("engine")
    beat.stop()
    beat.run(lambda: None)
    for second in range(100):
        assert not watchdog.poll(float(second))
    assert watchdog.healthy
    assert ends.empty()


def test_without_a_limit_an_engine_may_stand_still_but_not_die():
    timer, ends = NoTimer(), queue.Queue[str]()
    beat = EngineBeat("engine")
    watchdog = Watchdog([beat], 0.0, end=ends.put, timer=timer)
    assert not any(watchdog.poll(float(second)) for second in range(10_000))
    watchdog.start()
    beat.run(lambda: None)
    assert ends.get(timeout=30) == "the engine is dead"
    watchdog.stop()
    assert timer.wound == []


def test_the_timer_against_hangs_that_hold_the_interpreter_is_wound_up_and_stopped_at_the_end():
    timer, beat = NoTimer(), EngineBeat("engine")
    watchdog = Watchdog([beat], LIMIT, end=lambda reason: None, timer=timer)
    with beat.slow():
        watchdog.start()
        watchdog.stop()
    assert timer.wound[0] == HANG_FACTOR * LIMIT * SLOW_FACTOR
    assert timer.stops == 1


@pytest.mark.parametrize("seconds", [0.1, MIN_LIMIT - 0.1, -1.0, float("inf"), float("nan")])
def test_a_limit_that_an_engine_at_rest_would_pass_is_refused(seconds):
    with pytest.raises(ConfigError, match="--stall-timeout"):
        check_stall_timeout(seconds)


@pytest.mark.parametrize("seconds", [0.0, MIN_LIMIT, 60.0])
def test_other_limits_are_taken(seconds):
    check_stall_timeout(seconds)

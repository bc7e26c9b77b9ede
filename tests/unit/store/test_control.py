"""Commands to the store that are cancelled."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from triptych.store.address import parse_store_url
from triptych.store.control import Control
from triptych.store.results import StoreMemory, combined
from triptych.store.scripts import SLACK_SECONDS, ServerClock


class _LosesCancellations:
    """A pipeline like `asyncio.wait_for` of Python 3.11 whose result comes together with a cancel."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    def execute_command(self, *words: Any) -> None:
        pass

    async def execute(self, raise_on_error: bool) -> list[bytes]:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return [b"PONG"]
        raise AssertionError


async def test_a_cancellation_that_comes_together_with_the_reply_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    control = Control(parse_store_url("unix:///nowhere"), 5.0)
    pipeline = _LosesCancellations()
    monkeypatch.setattr(control._redis, "pipeline", lambda transaction: pipeline)
    asked = asyncio.create_task(control.execute("PING"))
    await pipeline.begun.wait()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await control.close()


GIB = 1 << 30


def memory(max_bytes: int, policy: str = "volatile-lru") -> StoreMemory:
    return StoreMemory(max_bytes, max_bytes // 4, policy)


def test_equal_servers_have_the_sum() -> None:
    assert combined([(memory(GIB), 0.25)] * 4) == StoreMemory(4 * GIB, GIB, "volatile-lru")


def test_the_server_that_is_full_first_bounds_the_budget() -> None:
    assert combined([(memory(10 * GIB), 0.5), (memory(GIB), 0.5)]).max_bytes == 2 * GIB
    assert combined([(memory(10 * GIB), 0.9), (memory(GIB), 0.1)]).max_bytes == pytest.approx(10 * GIB)


def test_a_server_without_a_limit_leaves_the_store_without_one() -> None:
    assert combined([(memory(GIB), 0.5), (memory(0), 0.5)]).max_bytes == 0
    assert combined([]).max_bytes == 0


def test_one_wrong_policy_is_the_policy_of_all() -> None:
    assert combined([(memory(GIB), 0.5), (memory(GIB, "noeviction"), 0.5)]).policy == "noeviction"


def test_a_clock_that_goes_on_evenly_never_jumps() -> None:
    """Answers may be slow, the clocks may start anywhere and drift by what crystals do."""
    rng = random.Random(4)
    clock, now = ServerClock(), 0.0
    for _ in range(2000):
        now += rng.choice((0.01, 0.5, 60.0))
        reply = rng.choice((0.0, 0.001, 0.3, 4.9))
        clock.answered(1.7e9 + (now + reply * rng.random()) * (1 + 20e-6), now, now + reply)
        now += reply
    assert clock.jumps == 0


@pytest.mark.parametrize("by", [-3600.0, -2 * SLACK_SECONDS, 2 * SLACK_SECONDS, 86400.0])
def test_every_jump_counts_once(by: float) -> None:
    clock = ServerClock()
    for at in range(10):
        clock.answered(1000.0 + at + (by if at >= 5 else 0.0), at, at + 0.001)
        assert clock.jumps == (at >= 5)


def test_a_slow_reply_widens_the_bounds_and_hides_no_jump() -> None:
    clock = ServerClock()
    clock.answered(1000.0, 0.0, 0.01)
    clock.answered(1004.0, 1.0, 6.0)
    assert clock.jumps == 0
    clock.answered(1107.0, 7.0, 7.01)
    assert clock.jumps == 1


def test_the_first_answer_is_no_jump() -> None:
    clock = ServerClock()
    clock.answered(1e9, 0.0, 0.0)
    assert clock.jumps == 0

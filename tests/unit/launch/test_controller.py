"""The controller follows what the store says, within the flags' bounds, and keeps what runs without it."""

from __future__ import annotations

import asyncio

import pytest

from support.waiting import until
from triptych.apps.launch import scaling
from triptych.apps.launch.scaling import PoolController, PoolWorkers
from triptych.base.config import WorkerRange
from triptych.base.scaling import ScalingDecision
from triptych.store.control import StoreUnavailable


class _Board:
    """Decisions by pool, or the error that reading them ends with."""

    def __init__(self) -> None:
        self.wanted: dict[str, int] = {}
        self.error: Exception | None = None
        self.hangs = False

    async def decision(self, pool: str) -> ScalingDecision | None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        wanted = self.wanted.get(pool)
        return None if wanted is None else ScalingDecision(wanted, "flow", active=True)


class _Host:
    """Workers that start at once and drain until `finish`."""

    def __init__(self) -> None:
        self.running: dict[str, list[str]] = {"encoder": [], "pd": ["pd-0"]}
        self.draining: list[str] = []
        self.calls: list[str] = []

    def workers(self, pool: str) -> PoolWorkers:
        return PoolWorkers([f"{pool}-{n}" for n in range(8)], tuple(self.running[pool]), self.draining)

    def start(self, name: str) -> None:
        self.calls.append(f"+{name}")
        self.running[name.partition("-")[0]].append(name)

    def drain(self, name: str) -> None:
        self.calls.append(f"-{name}")
        self.running[name.partition("-")[0]].remove(name)
        self.draining.append(name)


@pytest.fixture
def board() -> _Board:
    return _Board()


@pytest.fixture
def host() -> _Host:
    return _Host()


@pytest.fixture
def following(board: _Board, host: _Host) -> PoolController:
    return PoolController(board, {"encoder": WorkerRange(0, 3), "pd": WorkerRange(1, 2)}, host)


async def test_a_decision_outside_of_the_range_goes_to_its_end(board, host, following):
    board.wanted = {"encoder": 99, "pd": 0}
    for pool in ("encoder", "pd"):
        await following.follow(pool)
    assert host.running == {"encoder": ["encoder-0", "encoder-1", "encoder-2"], "pd": ["pd-0"]}


@pytest.mark.parametrize("error", [StoreUnavailable("down"), None])
async def test_without_a_store_or_a_decision_the_count_stays(board, host, following, error):
    board.wanted = {"encoder": 2}
    await following.follow("encoder")
    board.wanted, board.error = {}, error
    await following.follow("encoder")
    assert host.calls == ["+encoder-0", "+encoder-1"]


async def test_a_store_that_is_silent_keeps_nothing_else_waiting(board, host, following, monkeypatch):
    monkeypatch.setattr(scaling, "STORE_SECONDS", 0.01)
    board.hangs = True
    await following.follow("encoder")
    assert host.calls == []


async def test_the_controller_goes_on_after_an_outage_and_after_an_error_of_its_own(
    board: _Board, host: _Host, following: PoolController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "FOLLOW_SECONDS", 0.01)
    board.error = RuntimeError("what nobody expects")
    task = asyncio.create_task(following.run())
    try:
        await asyncio.sleep(0.05)
        board.error = StoreUnavailable("down")
        await asyncio.sleep(0.05)
        board.wanted, board.error = {"encoder": 1}, None
        await until(lambda: host.calls == ["+encoder-0"], "the start after the outage")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

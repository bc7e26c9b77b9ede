"""What the scaling benchmark reads of a cluster: the lines of its log, and the turns of a pool."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from benchmarks.scaling.timeline import PoolSample, Timeline, changes
from triptych.config import WorkerRange
from triptych.launch.scaling.change import PoolWorkers
from triptych.launch.scaling.controller import PoolController
from triptych.scaling import ScalingDecision


class _Board:
    wanted = 0

    async def decision(self, pool: str) -> ScalingDecision:
        return ScalingDecision(self.wanted, "backlog", active=True)


class _Host:
    def __init__(self) -> None:
        self.running: list[str] = []

    def workers(self, pool: str) -> PoolWorkers:
        return PoolWorkers([f"{pool}-{n}" for n in range(3)], tuple(self.running))

    def start(self, name: str) -> None:
        self.running.append(name)

    def drain(self, name: str) -> None:
        self.running.remove(name)


def test_the_changes_are_those_that_the_controller_logs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    board, host = _Board(), _Host()
    pools = {"encoder": WorkerRange(0, 3), "pd": WorkerRange(1, 3)}
    log = tmp_path / "log"
    with caplog.at_level(logging.INFO):
        for board.wanted in (2, 3, 3, 0):
            for pool in pools:
                asyncio.run(PoolController(board, pools, host).follow(pool))
                host.running = [name for name in host.running if name.startswith("encoder")]
    log.write_text("before\n" + caplog.text)
    assert changes(log, 0) == ["up", "up", "down"]
    assert changes(log, len(log.read_text())) == []


@pytest.mark.parametrize(
    ("words", "turns"),
    [
        (["up", "up", "down"], 1),
        (["up", "down", "up", "down"], 3),
        (["up"], 0),
        ([], 0),
    ],
)
def test_a_turn_is_a_change_of_direction(words: list[str], turns: int) -> None:
    assert Timeline(changes=[words]).turns() == [turns]


def test_the_most_encoders_are_those_that_ran_at_once() -> None:
    samples = [PoolSample(float(n), 4.0, running, 0, 0.0, 0.0) for n, running in enumerate((0, 3, 1))]
    assert Timeline(samples).most() == 3

"""Worker processes of one machine are started, drained and kept, by name."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from support.processes.processes import lives
from support.waiting import until, within
from triptych.apps.launch.plan.cluster import ClusterPlan
from triptych.apps.launch.scaling import LocalWorkers
from triptych.base.config import WorkerRange

#: On SIGTERM it waits until the file named by its first word is there, as a service waits for what it holds.
_WORKER = """
import os, signal, sys, time
def drain(*_):
    open(sys.argv[2] + ".draining", "w").close()
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    open(sys.argv[2] + ".finished", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, drain)
open(sys.argv[2], "a").write(f"{os.getpid()} ")
time.sleep(600)
"""
_REFUSES = "raise SystemExit(2)"


class _Machine:
    """A folder in which workers tell of themselves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.drained = folder / "drained"
        self.workers: LocalWorkers

    def plan(self, code: Mapping[str, str], scaled: Mapping[str, WorkerRange]) -> ClusterPlan:
        return ClusterPlan(
            workers=tuple(
                (name, (sys.executable, "-c", code[name], str(self.drained), str(self.folder / name)))
                for name in code
            ),
            worker_secrets={},
            proxy=(),
            proxy_secrets={},
            proxy_address=("127.0.0.1", 1),
            pools={},
            run_dir=self.folder,
            store_url="",
            store=None,
            scaled=scaled,
        )

    def has(self, code: Mapping[str, str], scaled: Mapping[str, WorkerRange]) -> LocalWorkers:
        self.workers = LocalWorkers(self.plan(code, scaled), None, lambda: None)
        return self.workers

    def pids(self, name: str) -> list[int]:
        """Every process that has had this name."""
        file = self.folder / name
        return [int(pid) for pid in file.read_text().split()] if file.exists() else []

    async def up(self, *names: str) -> None:
        for name in names:
            await until(lambda name=name: self.pids(name), f"the start of {name}")  # type: ignore[misc]


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[_Machine]:
    made = _Machine(tmp_path)
    yield made
    made.drained.touch()
    await within("the end of all", made.workers.end())
    await made.workers.close()
    assert not [pid for name in ("encoder-0", "encoder-1", "pd-0") for pid in made.pids(name) if lives(pid)]


THREE = dict.fromkeys(("pd-0", "encoder-0", "encoder-1"), _WORKER)


async def test_a_drained_worker_has_its_time_and_gives_its_name_back(machine: _Machine) -> None:
    workers = machine.has(THREE, {"encoder": WorkerRange(0, 2)})
    for name in ("encoder-0", "encoder-1"):
        workers.start(name)
    await machine.up("encoder-0", "encoder-1")
    workers.drain("encoder-1")
    (pid,) = machine.pids("encoder-1")
    pool = workers.workers("encoder")
    assert (pool.running, pool.draining) == (["encoder-0"], ["encoder-1"])
    assert lives(pid) and workers.processes["encoder-1"] == pid
    machine.drained.touch()
    await until(lambda: not workers.workers("encoder").draining, "the end of the drain")
    assert not lives(pid) and "encoder-1" not in workers.processes
    assert (machine.folder / "encoder-1.finished").exists()
    workers.start("encoder-1")
    await until(lambda: len(machine.pids("encoder-1")) == 2, "another start of this name")


async def test_a_worker_that_drains_for_long_is_not_killed_but_finishes(machine, monkeypatch):
    workers = machine.has(THREE, {"encoder": WorkerRange(0, 2)})
    workers.start("encoder-1")
    await machine.up("encoder-1")
    workers.drain("encoder-1")
    await until((machine.folder / "encoder-1.draining").exists, "the drain to begin")
    # The event loop's clock goes on by 90 s: what was to happen until then happens.
    loop = asyncio.get_running_loop()
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + 90.0)
    for _ in range(100):
        await asyncio.sleep(0)
    machine.drained.touch()
    await until(lambda: not workers.workers("encoder").draining, "the end of the drain")
    assert (machine.folder / "encoder-1.finished").exists(), "it was killed while it drained"


async def test_a_worker_that_dies_is_back_only_while_it_is_wanted(machine: _Machine) -> None:
    workers = machine.has(THREE, {"encoder": WorkerRange(0, 2)})
    for name in ("encoder-0", "encoder-1"):
        workers.start(name)
    await machine.up("encoder-0", "encoder-1")
    os.kill(machine.pids("encoder-0")[0], signal.SIGKILL)
    await until(lambda: len(machine.pids("encoder-0")) == 2, "the second start")
    workers.drain("encoder-1")
    os.kill(machine.pids("encoder-1")[0], signal.SIGKILL)
    await until(lambda: not workers.workers("encoder").draining, "the end of the drain")
    assert len(machine.pids("encoder-1")) == 1


@pytest.mark.parametrize("scaled", [{}, {"encoder": WorkerRange(0, 2)}])
async def test_a_worker_that_cannot_work_and_has_no_other_ends_the_cluster(machine, scaled):
    workers = machine.has({**THREE, "encoder-0": _REFUSES}, scaled)
    workers.start("encoder-0")
    assert await within("the end", workers.wait()) == 2

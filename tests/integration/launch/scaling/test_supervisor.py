"""Workers of this machine that are started and ended for scaling."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from support.processes.processes import lives, survivors
from support.waiting import until, within
from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.apps.launch.plan.cluster import ClusterPlan
from triptych.apps.launch.scaling import LocalWorkers, PoolChange, PoolWorkers, plan_change
from triptych.apps.launch.supervisor import Supervisor
from triptych.base.config import WorkerRange
from triptych.base.scaling import ScalingDecision
from triptych.registry.scaling import ScalingBoard
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore

_SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")
_TERM = 60.0


class _Supervised:
    """A supervisor of sleeping processes and of a store, and the decisions that it reads there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = EmbeddedStore(folder, 32 << 20)
        self._plan = ClusterPlan(
            workers=tuple((name, _SLEEP) for name in ("pd-0", "encoder-0", "encoder-1", "encoder-2")),
            worker_secrets={},
            proxy=_SLEEP,
            proxy_secrets={},
            proxy_address=("127.0.0.1", 1),
            pools={"encoder": 0, "pd": 1},
            run_dir=folder,
            store_url=self.store.url,
            store=self.store,
            scaled={"encoder": WorkerRange(0, 2)},
        )
        self.run = asyncio.create_task(Supervisor(self._plan, lambda: None).run())

    def processes(self) -> dict[str, int]:
        file = self.folder / "cluster.json"
        found = json.loads(file.read_text())["processes"] if file.exists() else {}
        return {name: pid for name, pid in found.items() if pid}

    def encoders(self) -> list[str]:
        return sorted(name for name in self.processes() if name.startswith("encoder"))

    async def decide(self, workers: int) -> None:
        store = await self._connected()
        try:
            board = ScalingBoard(store)
            await board.decision("encoder")
            await board.announce("encoder", ScalingDecision(workers, "flow", active=True), _TERM)
        finally:
            await store.close()

    async def _connected(self) -> EmbeddingStore:
        """A store that has just been started may not answer yet."""
        while True:
            with contextlib.suppress(StoreUnavailable):
                return await EmbeddingStore.connect(self.store.url)
            await asyncio.sleep(0.05)

    async def end(self) -> int:
        if not self.run.done():
            os.kill(os.getpid(), signal.SIGTERM)
        return await within("the end of all", self.run)


@pytest.fixture
async def supervised(tmp_path: Path) -> AsyncIterator[_Supervised]:
    made = _Supervised(tmp_path)
    await until(lambda: {"pd-0", "proxy"} <= made.processes().keys() or made.run.done(), "the first starts")
    yield made
    await made.end()


async def test_a_pool_grows_and_shrinks_with_the_decision(supervised: _Supervised) -> None:
    assert supervised.encoders() == []
    await supervised.decide(1)
    await until(lambda: supervised.encoders() == ["encoder-0"], "the first encoder")
    await supervised.decide(9)
    await until(lambda: supervised.encoders() == ["encoder-0", "encoder-1"], "the most encoders")
    gone = supervised.processes()["encoder-1"]
    await supervised.decide(1)
    await until(lambda: supervised.encoders() == ["encoder-0"], "the drain of the newest")
    assert not survivors([gone])
    await supervised.decide(0)
    await until(lambda: supervised.encoders() == [], "the last drain")
    assert {"pd-0", "proxy", "store"} <= supervised.processes().keys()


async def test_a_store_that_dies_leaves_the_workers_as_they_are(supervised: _Supervised) -> None:
    await supervised.decide(2)
    await until(lambda: len(supervised.encoders()) == 2, "two encoders")
    before = supervised.processes()
    os.kill(before["store"], signal.SIGKILL)
    await until(lambda: supervised.processes().get("store") not in (None, before["store"]), "another store")
    assert {name: supervised.processes()[name] for name in supervised.encoders()} == {
        name: before[name] for name in ("encoder-0", "encoder-1")
    }
    await supervised.decide(1)
    await until(lambda: supervised.encoders() == ["encoder-0"], "the drain by the new store's decision")


async def test_an_end_in_the_middle_of_a_start_leaves_no_process(supervised: _Supervised) -> None:
    await supervised.decide(2)
    await until(lambda: supervised.encoders(), "the first start")
    pids = list(supervised.processes().values())
    assert await supervised.end() == 0
    assert not survivors(pids)
    assert not (supervised.folder / "cluster.json").exists()


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
# A signal that comes just before a sleep is handled behind it.
while True:
    time.sleep(0.05)
"""
_REFUSES = "raise SystemExit(2)"


class _Machine:
    """A folder in which workers tell of themselves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.drained = folder / "drained"
        self.workers: LocalWorkers

    def plan(
        self, code: Mapping[str, str], scaled: Mapping[str, WorkerRange], targets: Mapping[str, str]
    ) -> ClusterPlan:
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
            targets=targets,
        )

    def has(
        self,
        code: Mapping[str, str],
        scaled: Mapping[str, WorkerRange],
        targets: Mapping[str, str] = MappingProxyType({}),
    ) -> LocalWorkers:
        self.workers = LocalWorkers(self.plan(code, scaled, targets), None, lambda: None)
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


async def test_of_a_role_that_is_scaled_its_own_workers_start_and_drain(machine: _Machine) -> None:
    targets = {"pd-0": "pd;role=prefill", "pd-1": "pd;role=decode", "pd-2": "pd;role=decode"}
    workers = machine.has(dict.fromkeys(targets, _WORKER), {"pd;role=decode": WorkerRange(1, 2)}, targets)
    assert workers.first == ["pd-0", "pd-1"], "a role of a fixed number runs whole"
    workers.start_first()
    assert plan_change(workers.workers("pd;role=decode"), 2) == PoolChange(start=("pd-2",))
    workers.start("pd-2")
    await machine.up(*targets)
    assert plan_change(workers.workers("pd;role=decode"), 1) == PoolChange(drain=("pd-2",))
    workers.drain("pd-2")
    assert workers.workers("pd;role=prefill") == PoolWorkers(["pd-0"], ["pd-0"], [])
    machine.drained.touch()
    await until(lambda: not workers.workers("pd;role=decode").draining, "the end of the drain")
    assert workers.workers("pd;role=decode").running == ["pd-1"]


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

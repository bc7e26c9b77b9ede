"""A supervisor follows the decisions that the proxies put into the store."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.processes.processes import survivors
from support.waiting import until, within
from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.apps.launch.plan.cluster import ClusterPlan
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

"""Fixtures for tests that need the real store. Light: no torch, and no server unless it is asked for."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import cluster_folders
from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.store.embedding_store import EmbeddingStore

# Tiny models lose more at OpenMP's barriers than a second thread gives; read when torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# gRPC's errors alone, as in services: else each fork beside its threads is an INFO line. Read at its import.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Collecting garbage among the modules that the tests import takes a tenth of the run and finds nothing.
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """After pytest's own fault handler is set up, which writes to a stream that a log's end does not show."""
    from support.crash_reports import report_crashes

    report_crashes(config)
    # Clusters that stand still take time from the tests of other folders.
    config.pluginmanager.register(cluster_folders)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one file, or of a folder with clusters, stay in one process where several share the run."""
    from support.folder_scheduling import FolderScheduling

    return FolderScheduling(config, log)


def pytest_collection_finish() -> None:
    """From here on garbage is collected, but not looked for in what was imported."""
    gc.freeze()
    # A look for garbage at every 700 objects takes a thirtieth of the run.
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


@pytest.fixture
def prepack_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every linear layer that is loaded is prepacked, as those of large models are."""
    from triptych.models.weights import prepack

    monkeypatch.setattr(prepack, "MINIMUM", dict.fromkeys(prepack.MINIMUM, 0))


@pytest.fixture(scope="session")
def store_url() -> Iterator[str]:
    """The address of a store that all tests of this run share; not flushed between them."""
    with tempfile.TemporaryDirectory(prefix="triptych-") as folder:
        server = EmbeddedStore(Path(folder), 512 << 20)
        server.start()
        try:
            yield server.url
        finally:
            server.stop()


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[EmbeddingStore]:
    """A connection to the shared store, emptied before the test."""
    connected = await EmbeddingStore.connect(store_url)
    await connected.control.execute("FLUSHALL")
    yield connected
    await connected.close()

"""Fixtures for tests that need the real store. Light: no torch, and no server unless it is asked for."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from triptych.ec_connector.store import EmbeddingStore
from triptych.launch.embedded_store import EmbeddedStore

# Tiny models lose more at OpenMP's barriers than a second thread gives; read when torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Collecting garbage among the modules that the tests import takes a tenth of the run and finds nothing.
gc.disable()


#: Folders whose tests share clusters of the session: all of one folder run in one process.
CLUSTER_FOLDERS = ("chaos", "e2e", "fuzz", "security")


@pytest.hookimpl(tryfirst=True)  # before the names of the groups are read
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Names the tests that stay together when several processes share the run."""
    root = Path(__file__).parent
    for item in items:
        folder, *rest = item.path.relative_to(root).parts
        group = folder if folder in CLUSTER_FOLDERS else "/".join((folder, *rest))
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_finish() -> None:
    """From here on garbage is collected, but not looked for in what was imported."""
    gc.freeze()
    gc.enable()


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

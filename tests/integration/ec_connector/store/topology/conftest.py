"""Stores of every topology, of real servers."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from support.stores.redis_cluster import redis_cluster
from support.stores.sentinels import watched_servers
from support.stores.server import StoreServer
from triptych.ec_connector.store.embedding_store import EmbeddingStore


@contextlib.contextmanager
def _shards(folder: Path, count: int) -> Iterator[list[StoreServer]]:
    servers = [StoreServer(folder / f"shard-{index}") for index in range(count)]
    try:
        for server in servers:
            server.start()
        yield servers
    finally:
        for server in servers:
            server.kill()


@pytest.fixture(scope="module", params=["cluster", "sentinels", "three shards"])
def topology_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The value of --store for servers of one topology, which the tests of a module share."""
    with tempfile.TemporaryDirectory(prefix="triptych-") as name:
        folder = Path(name)
        if request.param == "cluster":
            with redis_cluster(folder) as cluster:
                yield cluster.url
        elif request.param == "sentinels":
            with watched_servers(folder) as watched:
                yield watched.url
        else:
            with _shards(folder, 3) as shards:
                yield " ".join(shard.url for shard in shards)


@pytest.fixture
async def topology_store(topology_url: str) -> AsyncIterator[EmbeddingStore]:
    """The connected store of that topology, emptied."""
    store = await EmbeddingStore.connect(topology_url)
    for shard in store.shards:
        for each in shard.topology.servers():
            await each.server.control.execute("FLUSHALL")
    yield store
    await store.close()


@pytest.fixture
def three_shards(tmp_path: Path) -> Iterator[list[StoreServer]]:
    """Three servers of the test's own."""
    with _shards(tmp_path, 3) as servers:
        yield servers

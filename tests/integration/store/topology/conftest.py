"""Stores of every topology, of real servers."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from support.stores.redis_cluster import redis_cluster
from support.stores.sentinels import watched_servers
from triptych.store.embedding_store import EmbeddingStore


@pytest.fixture(scope="module", params=["cluster", "sentinels"])
def topology_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The value of --store for servers of one topology, which the tests of a module share."""
    with tempfile.TemporaryDirectory(prefix="triptych-") as name:
        folder = Path(name)
        if request.param == "cluster":
            with redis_cluster(folder) as cluster:
                yield cluster.url
        else:
            with watched_servers(folder) as watched:
                yield watched.url


@pytest.fixture
async def topology_store(topology_url: str) -> AsyncIterator[EmbeddingStore]:
    """The connected store of that topology, emptied."""
    store = await EmbeddingStore.connect(topology_url)
    for each in store.topology.servers():
        await each.server.control.execute("FLUSHALL")
    yield store
    await store.close()

"""A cluster, whose proxy looks at registry, workers and certificates more often than a deployed one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from support.fakes.proxy_fakes import FakeCluster, poll_often
from triptych.store.embedding_store import EmbeddingStore


@pytest.fixture(autouse=True)
def frequent_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    poll_often(monkeypatch)


@pytest.fixture
async def cluster(store: EmbeddingStore) -> AsyncIterator[FakeCluster]:
    """A proxy with one encoder and one PD worker, in which nothing is left when the test has ended."""
    async with FakeCluster(store) as cluster:
        yield cluster
        await cluster.at_rest()

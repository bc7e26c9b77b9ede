"""Requests made from our own OpenAPI document, and near it, against the real proxy: never a 5xx."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis

from support.fakes.proxy_fakes import FakeCluster
from support.hostile.fuzzing import Fuzzer
from triptych.store.embedding_store import EmbeddingStore


class Running:
    """A proxy over scripted workers, in a thread with a loop of its own."""

    def __init__(self, store_url: str) -> None:
        self._store_url = store_url
        self._ready = threading.Event()
        self._over: asyncio.Event | None = None
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),))
        self.cluster: FakeCluster | None = None
        self.url = ""

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        store = await EmbeddingStore.connect(self._store_url)
        await store.control.execute("FLUSHALL")
        async with FakeCluster(store) as self.cluster:
            self.url = f"http://127.0.0.1:{self.cluster.port}"
            self._ready.set()
            await self._over.wait()
            await self.cluster.at_rest()
        await store.close()

    def __enter__(self) -> Running:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def running(store_url: str) -> Iterator[Running]:
    with Running(store_url) as running:
        yield running


def test_no_request_of_the_documents_making_is_answered_with_5xx(running: Running, fuzzer: Fuzzer) -> None:
    document = requests.get(f"{running.url}/openapi.json", timeout=20).json()
    schema = schemathesis.openapi.from_dict(document)
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 5

    def check(case: Any) -> None:
        reply = case.call(base_url=running.url, timeout=30)
        assert reply.status_code < 500, (reply.status_code, reply.text[:500])
        if reply.status_code >= 400:
            assert "error" in reply.json(), reply.text[:500]

    for operation in operations:
        count = 3 if operation.method.upper() == "POST" else 1
        fuzzer.run(f"OpenAPI {operation.label}", operation.as_strategy(), check, count)
    assert requests.get(f"{running.url}/ready", timeout=20).status_code == 200

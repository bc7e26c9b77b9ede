"""Processes that load and save items at the same time, as several workers do."""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import os
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection

from triptych.ec_connector.store import keys
from triptych.ec_connector.store.embedding_store import EmbeddingStore
from triptych.ec_connector.store.results import Loaded, SaveResult
from triptych.types import ItemPlan

#: Items of one client, all at once: small pictures with deepstack in bf16.
_ITEMS, _ROWS, _WIDTH = 16, 100, 5120
ITEM_BYTES = _ROWS * _WIDTH * 2
BYTES = _ITEMS * ITEM_BYTES


class Clients:
    """`count` client processes, connected to every arrangement."""

    def __init__(self, urls: Mapping[str, str], count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run, args=(dict(urls), number, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def rate(self, operation: str, name: str) -> float:
        """GB/s of all clients together, which do this at the same time."""
        began = time.perf_counter()
        for pipe in self._pipes:
            pipe.send((operation, name))
        for pipe in self._pipes:
            pipe.recv()
        return len(self._pipes) * BYTES / (time.perf_counter() - began) / 1e9

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()


def _run(urls: dict[str, str], number: int, pipe: Connection) -> None:
    asyncio.run(_serve(urls, number, pipe))


async def _serve(urls: dict[str, str], number: int, pipe: Connection) -> None:
    client = _Client(number)
    stores = {name: await EmbeddingStore.connect(url, timeout=60.0) for name, url in urls.items()}
    pipe.send("ready")
    while True:
        operation, name = await asyncio.to_thread(pipe.recv)
        await getattr(client, operation)(stores[name])
        pipe.send("done")


class _Client:
    """The operations. Every buffer is made and touched before."""

    def __init__(self, number: int) -> None:
        hashes = [hashlib.sha256(f"{number} {n}".encode()).hexdigest() for n in range(_ITEMS)]
        self._plans = [
            ItemPlan(mm_hash, "b", "image", _ROWS, _WIDTH, "bfloat16", _ROWS) for mm_hash in hashes
        ]
        self._body = os.urandom(ITEM_BYTES)
        self._buffers = [memoryview(bytearray(self._body)) for _ in self._plans]

    async def load(self, store: EmbeddingStore) -> None:
        results = await asyncio.gather(
            *(
                store.load(plan, lambda nbytes, buffer=buffer: buffer)  # type: ignore[misc]
                for plan, buffer in zip(self._plans, self._buffers, strict=True)
            )
        )
        if not all(isinstance(result, Loaded) for result in results):
            raise RuntimeError(f"not all are there: {results}")

    async def save(self, store: EmbeddingStore) -> None:
        results = await asyncio.gather(*(store.save(plan, self._body, ttl=3600) for plan in self._plans))
        if set(results) != {SaveResult.STORED}:
            raise RuntimeError("the keys were not free")

    async def free(self, store: EmbeddingStore) -> None:
        for shard in store.shards:
            await shard.control.execute_all(
                [("UNLINK", keys.embedding(plan.mm_hash)) for plan in self._plans]
            )

"""Transfers of embeddings: the store over its unix socket against memcpy and redis-py."""

from __future__ import annotations

import asyncio
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import redis
import redis.asyncio

from benchmarks.result_page import RESULTS, fill, page_parser, publish
from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.base.types import ItemPlan
from triptych.store import keys
from triptych.store.bulk import Loaded, SaveResult
from triptych.store.embedding_store import EmbeddingStore

RESULT = RESULTS / "ec_transfer.md"
_AT_ONCE = 8
#: One large picture with deepstack in bf16: 1280 rows of 5120.
_ROWS, _WIDTH = 1280, 5120


def plan_of(name: str) -> ItemPlan:
    mm_hash = hashlib.sha256(name.encode()).hexdigest()
    return ItemPlan(mm_hash, "benchmark", "image", _ROWS, _WIDTH, "bfloat16", _ROWS)


class TransferRates:
    """The operations that are compared. Every buffer is made and touched before."""

    def __init__(self, store: EmbeddingStore, client: redis.asyncio.Redis) -> None:
        self.store, self.client = store, client
        self.plans = [plan_of(f"item {n}") for n in range(_AT_ONCE)]
        self.body = os.urandom(self.plans[0].nbytes)
        self.buffers = [memoryview(bytearray(plan.nbytes)) for plan in self.plans]
        for buffer in self.buffers:
            buffer[:] = bytes(len(buffer))
        self.array = np.frombuffer(self.body, np.uint8)
        self.target = np.zeros_like(self.array)

    async def prepare(self) -> None:
        await self.store.control.execute("FLUSHALL")
        for n, plan in enumerate(self.plans):
            await self.store.save(plan, self.body, ttl=3600)
            await self.client.set(f"plain {n}", self.body, ex=3600)

    async def memcpy(self, n: int) -> None:
        np.copyto(self.target, self.array)

    async def load(self, n: int) -> None:
        result = await self.store.load(self.plans[n], lambda nbytes: self.buffers[n])
        if not isinstance(result, Loaded):
            raise RuntimeError(result.reason)

    async def redis_load(self, n: int) -> None:
        await self.client.get(f"plain {n}")

    async def save(self, n: int) -> None:
        if await self.store.save(self.plans[n], self.body, ttl=3600) is not SaveResult.STORED:
            raise RuntimeError("the key was not free")

    async def redis_save(self, n: int) -> None:
        await self.client.set(f"plain {n}", self.body, ex=3600)

    async def free(self) -> None:
        names = [keys.embedding(plan.mm_hash) for plan in self.plans]
        await self.store.control.execute("UNLINK", *names, *(f"plain {n}" for n in range(_AT_ONCE)))


async def seconds(work: Callable[[int], Awaitable[None]], count: int) -> float:
    """Of `count` calls at once."""
    began = time.perf_counter()
    await asyncio.gather(*map(work, range(count)))
    return time.perf_counter() - began


async def measure(url: str, repeats: int) -> dict[str, list[float]]:
    """GB/s of every repeat by operation; one of each per round, so that noise meets all alike."""
    store = await EmbeddingStore.connect(url)
    client = redis.asyncio.Redis.from_url(url)
    transfers = TransferRates(store, client)
    size = len(transfers.body)
    reads = {
        "memcpy": (transfers.memcpy, 1),
        "load": (transfers.load, 1),
        "redis-py load": (transfers.redis_load, 1),
        "8 loads": (transfers.load, _AT_ONCE),
        "redis-py 8 loads": (transfers.redis_load, _AT_ONCE),
    }
    writes = {
        "save": (transfers.save, 1),
        "redis-py save": (transfers.redis_save, 1),
        "8 saves": (transfers.save, _AT_ONCE),
        "redis-py 8 saves": (transfers.redis_save, _AT_ONCE),
    }
    speeds: dict[str, list[float]] = {name: [] for name in (*reads, *writes)}
    try:
        await transfers.prepare()
        for turn in range(repeats + 1):
            for name, (work, count) in (reads | writes).items():
                if name in writes:
                    await transfers.free()
                speeds[name].append(count * size / await seconds(work, count) / 1e9)
            await transfers.prepare()
            if turn == 0:
                for values in speeds.values():
                    values.clear()
    finally:
        await store.close()
        await client.aclose()
    return speeds


_RATIOS = (
    ("load", "memcpy", "≥ 0.2"),
    ("8 loads", "redis-py 8 loads", "≥ 2"),
    ("load", "redis-py load", ""),
    ("save", "memcpy", ""),
    ("8 saves", "redis-py 8 saves", ""),
    ("save", "redis-py save", ""),
)


def report(speeds: dict[str, list[float]], command: str) -> str:
    """The results as the committed page has them."""
    median = {name: statistics.median(values) for name, values in speeds.items()}
    best = {name: max(values) for name, values in speeds.items()}
    ratios = [(f"{a} / {b}", median[a] / median[b], best[a] / best[b], target) for a, b, target in _RATIOS]
    return fill(
        "ec_transfer",
        command=command,
        redis=redis.__version__,
        megabytes=_ROWS * _WIDTH * 2 / 1e6,
        ratios="\n".join(f"| {name} | {a:.2f} | {b:.2f} | {target} |" for name, a, b, target in ratios),
        speeds="\n".join(f"| {name} | {median[name]:.2f} | {best[name]:.2f} |" for name in speeds),
    )


def main() -> None:
    options = page_parser(__doc__, RESULT, repeats=20).parse_args()
    with tempfile.TemporaryDirectory() as folder, EmbeddedStore(Path(folder), 1 << 30) as server:
        speeds = asyncio.run(measure(server.url, options.repeats))
    page = report(speeds, f"python -m benchmarks ec_transfer --repeats {options.repeats}")
    publish(page, RESULT, write=options.write)

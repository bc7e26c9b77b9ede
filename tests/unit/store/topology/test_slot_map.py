"""How often a Redis Cluster's slot map is read, by a clock that the test holds."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from support.clock import Clock
from triptych.store.topology import cluster
from triptych.store.topology.cluster import RedisCluster
from triptych.store.topology.location import parse_store

ROWS = [[0, 16383, [b"127.0.0.1", 7000, b"id"]]]


async def test_a_slot_map_is_read_again_only_a_pause_after_the_last_reading(monkeypatch) -> None:
    clock, read = Clock(100.0), []

    async def execute(*words: str) -> list[Any]:
        read.append(clock.now)
        return ROWS

    async def sleep(seconds: float) -> None:
        clock.now += max(seconds, 0.0)
        await asyncio.sleep(0)

    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(cluster, "asyncio", SimpleNamespace(sleep=sleep, Lock=asyncio.Lock))
    made = RedisCluster(parse_store("redis+cluster://127.0.0.1:7000"), 1.0)
    server: Any = SimpleNamespace(control=SimpleNamespace(execute=execute), address=made._seeds[0])
    monkeypatch.setattr(made, "_server_at", lambda place: server)
    for _ in range(3):
        clock.now += 0.01
        await made._refresh()
    assert [later - earlier for earlier, later in zip(read, read[1:], strict=False)] == [
        pytest.approx(cluster._PAUSE)
    ] * 2
    clock.now += 1.0
    await asyncio.gather(made._refresh(), made._refresh())
    assert len(read) == 4, "who asked before the reading began has its answer"

"""How often a Redis Cluster's slot map is read, and Sentinels are asked, by a clock that the test holds."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from support.clock import Clock
from triptych.store.control import StoreUnavailable
from triptych.store.topology import cluster, sentinel
from triptych.store.topology.cluster import RedisCluster
from triptych.store.topology.location import parse_store
from triptych.store.topology.sentinel import SentinelPrimary
from triptych.store.topology.topology import _after_asking

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


async def test_sentinels_are_asked_once_a_term_and_at_once_where_the_primary_has_failed(
    monkeypatch,
) -> None:
    clock, asked = Clock(100.0), []
    monkeypatch.setattr(sentinel, "time", SimpleNamespace(monotonic=clock))
    made = SentinelPrimary(parse_store("redis+sentinel://127.0.0.1:26379/primary"), 1.0)

    async def find() -> Any:
        asked.append(clock.now)
        made._server = made._server or object()  # type: ignore[assignment]
        return made._server

    monkeypatch.setattr(made, "_find", find)
    server = await made._primary()
    assert await made._primary() is server and await made._primary() is server
    await asyncio.sleep(0)
    assert asked == [100.0]
    clock.now += 1.01 * sentinel._ASK_SECONDS
    assert await made._primary() is server
    await asyncio.sleep(0)
    assert len(asked) == 2
    await made._primary(failed=server)
    assert len(asked) == 3


async def test_a_slot_that_is_being_moved_is_asked_for_before_the_command() -> None:
    sent: list[str] = []

    async def asking() -> None:
        sent.append("ASKING")

    async def get(connection: Any) -> str:
        sent.append("GET")
        return "value"

    exchange: Any = _after_asking(get)
    assert await exchange(SimpleNamespace(asking=asking)) == "value"
    assert sent == ["ASKING", "GET"]


async def test_a_server_that_does_not_tell_of_its_memory_in_time_cannot_be_reached(monkeypatch) -> None:
    """Who asks while it saves has one error to expect."""
    made = RedisCluster(parse_store("redis+cluster://127.0.0.1:7000"), 0.01)

    async def never(key: str) -> Any:
        await asyncio.sleep(60.0)

    monkeypatch.setattr(made, "owner", never)
    with pytest.raises(StoreUnavailable, match="not reachable: no answer in time"):
        await made.memory_of("a")

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import msgpack

from support.waiting import until
from triptych.ec_connector import keys
from triptych.ec_connector.heartbeat import Heartbeat
from triptych.ec_connector.registry import Registry
from triptych.ec_connector.store import EmbeddingStore, StoreUnavailable
from triptych.launch.embedded_store import EmbeddedStore
from triptych.types import WorkerInfo

ENCODER = WorkerInfo("10.0.0.1:5000", "encoder", "i1", "k", "m", ("ns1", "ns2"), {"plan_credit": 16})
PD = WorkerInfo("10.0.0.1:5000", "pd", "i2", "k", "m")


async def becomes(registry: Registry, expected: list[WorkerInfo]) -> None:
    async with asyncio.timeout(10):
        while await registry.workers() != expected:
            await asyncio.sleep(0.01)


async def test_registered_workers_are_found_as_they_were_told(store: EmbeddingStore) -> None:
    registry = Registry(store)
    await registry.register(PD)
    await registry.register(ENCODER)
    assert await registry.workers() == [ENCODER, PD]


async def test_a_worker_whose_term_has_ended_is_not_found(store: EmbeddingStore) -> None:
    registry = Registry(store)
    await registry.register(ENCODER, term=-1)
    await registry.register(PD)
    assert await registry.workers() == [PD]


async def test_a_restarted_worker_takes_the_place_of_its_former_self(store: EmbeddingStore) -> None:
    registry = Registry(store)
    await registry.register(ENCODER)
    successor = dataclasses.replace(ENCODER, incarnation="i3")
    await registry.register(successor)
    await registry.withdraw(ENCODER)
    assert await registry.workers() == [successor]
    await registry.withdraw(dataclasses.replace(successor, capacity={"plan_credit": 3}))
    await registry.withdraw(successor)
    assert await registry.workers() == []


async def test_a_registration_of_before_modalities_is_one_of_images(store: EmbeddingStore) -> None:
    registry = Registry(store)
    await registry.register(ENCODER)
    name = "encoder 10.0.0.1:5000"
    raw = await store.control.execute("HGET", keys.WORKERS, name)
    head, _, packed = raw.partition(b"\n")
    fields = msgpack.unpackb(packed)
    del fields["modality"]
    await store.control.execute("HSET", keys.WORKERS, name, head + b"\n" + msgpack.packb(fields))
    assert await registry.workers() == [ENCODER]
    assert ENCODER.modality == "image"
    await registry.register(dataclasses.replace(ENCODER, modality="audio"))
    assert [info.modality for info in await registry.workers()] == ["audio"]


async def test_registrations_have_no_ttl(store: EmbeddingStore) -> None:
    await Registry(store).register(ENCODER)
    assert await store.control.execute("PTTL", keys.WORKERS) == -1


async def test_live_proxies_are_counted(store: EmbeddingStore) -> None:
    registry = Registry(store)
    for name in ("p1", "p2", "p1"):
        await registry.declare_proxy(name, 60)
    await registry.declare_proxy("gone", -1)
    assert await registry.proxies() == 2


async def test_only_registrations_long_past_their_deadline_are_collected(store: EmbeddingStore) -> None:
    registry = Registry(store)
    await registry.register(ENCODER, term=-700)
    await registry.register(PD, term=-10)
    await registry.declare_proxy("dead", -700)
    await registry.declare_proxy("live", 60)
    assert await registry.collect_dead() == 2
    assert await store.control.execute("HKEYS", keys.WORKERS) == [b"pd 10.0.0.1:5000"]


async def test_a_registration_that_cannot_be_read_hides_no_other(store: EmbeddingStore) -> None:
    registry = Registry(store)
    await registry.register(ENCODER)
    far = b"9" * 16
    for name, raw in {"a": b"", "b": b"rubbish", "c": far + b"i\n\xff", "d": far + b"i\n\x80"}.items():
        await store.control.execute("HSET", keys.WORKERS, name, raw)
    assert await registry.workers() == [ENCODER]


async def test_a_heartbeat_registers_at_once_and_withdraws_at_its_end(store: EmbeddingStore) -> None:
    registry = Registry(store)
    heartbeat = Heartbeat(registry, ENCODER, interval=0.02)
    heartbeat.start()
    await becomes(registry, [ENCODER])
    await heartbeat.stop()
    await heartbeat.stop()
    assert await registry.workers() == []


async def test_a_heartbeat_comes_back_after_a_flush(store: EmbeddingStore) -> None:
    registry = Registry(store)
    heartbeat = Heartbeat(registry, ENCODER, interval=0.02)
    heartbeat.start()
    await becomes(registry, [ENCODER])
    await store.control.execute("FLUSHALL")
    await becomes(registry, [ENCODER])
    await heartbeat.stop(withdraw=False)
    assert await registry.workers() == [ENCODER]


async def test_a_heartbeat_outlives_the_stores_absence(tmp_path: Path) -> None:
    server = EmbeddedStore(tmp_path, 64 << 20)
    server.start()
    store = await EmbeddingStore.connect(server.url, timeout=1)
    registry = Registry(store)
    heartbeat = Heartbeat(registry, ENCODER, interval=0.02)
    try:
        heartbeat.start()
        await becomes(registry, [ENCODER])
        server.stop()
        await asyncio.sleep(0.1)
        server.start()
        await becomes(registry, [ENCODER])
        server.stop()
        await heartbeat.stop()
    finally:
        await store.close()
        server.stop()


async def test_a_worker_is_not_registered_while_it_is_not_healthy(
    store: EmbeddingStore,
) -> None:
    healthy = False
    registry = Registry(store)
    heartbeat = Heartbeat(registry, ENCODER, interval=0.02, healthy=lambda: healthy)
    # The last one of a healthy past, which nobody renews.
    await registry.register(ENCODER, term=0.2)
    heartbeat.start()
    await becomes(registry, [])
    healthy = True
    await becomes(registry, [ENCODER])
    await heartbeat.stop()


async def test_a_registration_that_fails_as_nobody_thought_is_tried_again() -> None:
    class Failing:
        """Fails once."""

        def __init__(self) -> None:
            self.tries = 0

        async def register(self, info: WorkerInfo) -> None:
            self.tries += 1
            if self.tries == 1:
                raise ValueError("a bug")

    registry = Failing()
    heartbeat = Heartbeat(registry, PD, interval=0.02)  # type: ignore[arg-type]
    heartbeat.start()
    await until(lambda: registry.tries > 1, "another try")
    await heartbeat.stop(withdraw=False)


async def test_a_heartbeat_stops_although_a_store_command_swallows_its_cancellation() -> None:
    class Swallowing:
        """Answers a cancellation as redis-py may while it connects: with an error of its own."""

        async def register(self, info: WorkerInfo) -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                raise StoreUnavailable("interrupted") from None

    heartbeat = Heartbeat(Swallowing(), PD)  # type: ignore[arg-type]
    heartbeat.start()
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await heartbeat.stop(withdraw=False)

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgpack
import pytest

from support.stores.commands import commands
from support.waiting import until
from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.base.types import WorkerInfo
from triptych.registry.registry import Heartbeat, Registry
from triptych.store import keys
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore

ENCODER = WorkerInfo("10.0.0.1:5000", "encoder", "i1", "k", "m", ("ns1", "ns2"), {"plan_credit": 16})
PD = WorkerInfo("10.0.0.1:5000", "pd", "i2", "k", "m")
RESTARTED = dataclasses.replace(PD, incarnation="i9")


async def becomes(registry: Registry, expected: list[WorkerInfo]) -> None:
    """Once it has them; a store that has just been away may still be missed."""
    async with asyncio.timeout(45):
        while True:
            with contextlib.suppress(StoreUnavailable):
                if await registry.workers() == expected:
                    return
            await asyncio.sleep(0.01)


@pytest.fixture
async def registry(store: EmbeddingStore) -> Registry:
    return Registry(store)


async def test_registered_workers_are_found_as_they_were_told(registry: Registry) -> None:
    await registry.register(PD)
    await registry.register(ENCODER)
    assert await registry.workers() == [ENCODER, PD]


async def test_a_heartbeat_stops_without_waiting_for_its_next_beat(registry: Registry) -> None:
    heartbeat = Heartbeat(registry, PD, interval=3600.0)
    heartbeat.start()
    await becomes(registry, [PD])
    stopping = asyncio.create_task(heartbeat.stop())
    assert (await asyncio.wait([stopping], timeout=20))[0], "it waits for its next beat"
    assert await registry.workers() == []


async def test_a_restarted_worker_takes_the_place_of_its_former_self(registry: Registry) -> None:
    await registry.register(ENCODER)
    successor = dataclasses.replace(ENCODER, incarnation="i3")
    await registry.register(successor)
    await registry.withdraw(ENCODER)
    assert await registry.workers() == [successor]
    await registry.withdraw(dataclasses.replace(successor, capacity={"plan_credit": 3}))
    await registry.withdraw(successor)
    assert await registry.workers() == []


async def test_a_registration_of_before_modalities_is_one_of_images(registry, store):
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


async def test_a_look_names_the_workers_only_when_they_are_others_than_at_the_mark(registry, store):
    await registry.register(ENCODER)
    first = await registry.poll("p")
    assert (first.workers, first.proxies) == ([ENCODER], 1)
    await registry.register(ENCODER)
    same = await registry.poll("p", mark=first.mark)
    assert (same.workers, same.mark, same.epoch) == (None, first.mark, first.epoch)
    changes: list[tuple[Callable[[], Awaitable[object]], list[WorkerInfo]]] = [
        (lambda: registry.register(PD), [ENCODER, PD]),
        (lambda: registry.withdraw(ENCODER), [PD]),
        (lambda: registry.register(RESTARTED), [RESTARTED]),
        # As a deadline that passes.
        (lambda: store.control.execute("ZADD", keys.WORKER_DEADLINES, 1, "pd 10.0.0.1:5000"), []),
        (lambda: registry.register(RESTARTED), [RESTARTED]),
        (lambda: store.control.execute("FLUSHALL"), []),
        (lambda: registry.register(RESTARTED), [RESTARTED]),
    ]
    mark = same.mark
    for change, expected in changes:
        await change()
        look = await registry.poll("p", mark=mark)
        assert look.workers == expected
        mark = look.mark
        assert (await registry.poll("p", mark=mark)).workers is None


async def test_a_look_tells_of_a_flush_by_another_epoch(registry: Registry, store: EmbeddingStore) -> None:
    first = await registry.poll("p")
    assert first.epoch == await store.epoch()
    await store.control.execute("FLUSHALL")
    assert (await registry.poll("p", mark=first.mark)).epoch != first.epoch


async def test_a_look_at_unchanged_workers_costs_the_store_as_much_for_two_as_for_two_hundred(
    registry: Registry, store: EmbeddingStore
) -> None:
    costs, sizes = [], []
    for count in (2, 200):
        for n in range(count):
            await registry.register(dataclasses.replace(ENCODER, address=f"10.0.0.2:{n}"))
        mark = (await registry.poll("p")).mark
        before = await commands(store)
        look = await registry.poll("p", mark=mark)
        spent = await commands(store) - before
        costs.append(sum(calls for name, calls in spent.items() if name != "info"))
        sizes.append(look.workers)
        assert spent["eval"] == 1
    assert costs[0] == costs[1]
    assert sizes == [None, None]


async def test_only_registrations_long_past_their_deadline_are_collected(registry, store):
    await registry.register(ENCODER, term=-700)
    await registry.register(PD, term=-10)
    await registry.declare_proxy("dead", -700)
    await registry.declare_proxy("live", 60)
    assert await registry.collect_dead() == 2
    assert await store.control.execute("HKEYS", keys.WORKERS) == [b"pd 10.0.0.1:5000"]


async def test_a_registration_that_cannot_be_read_hides_no_other(registry, store):
    await registry.register(ENCODER)
    far = 9 * 10**15
    for name, raw in {"a": b"", "b": b"rubbish", "c": b"i\n\xff", "d": b"i\n\x80"}.items():
        await store.control.execute("HSET", keys.WORKERS, name, raw)
        await store.control.execute("ZADD", keys.WORKER_DEADLINES, far, name)
    assert await registry.workers() == [ENCODER]


async def test_a_heartbeat_registers_at_once_and_withdraws_at_its_end(registry: Registry) -> None:
    heartbeat = Heartbeat(registry, ENCODER, interval=0.02)
    heartbeat.start()
    await becomes(registry, [ENCODER])
    await heartbeat.stop()
    await heartbeat.stop()
    assert await registry.workers() == []


async def test_a_registration_that_changes_is_renewed_under_its_incarnation(registry: Registry) -> None:
    places = 2
    heartbeat = Heartbeat(
        registry,
        PD,
        interval=0.02,
        renewed=lambda info: dataclasses.replace(info, capacity={"max_num_seqs": places}),
    )
    heartbeat.start()
    await becomes(registry, [dataclasses.replace(PD, capacity={"max_num_seqs": 2})])
    seen = await registry.poll("proxy")
    places = 4
    await becomes(registry, [dataclasses.replace(PD, capacity={"max_num_seqs": 4})])
    assert (await registry.poll("proxy", mark=seen.mark)).workers is not None
    await heartbeat.stop()
    assert await registry.workers() == []


async def test_a_heartbeat_comes_back_after_a_flush(registry: Registry, store: EmbeddingStore) -> None:
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
        await until(heartbeat.degraded, "a beat without the store")
        server.start()
        await becomes(registry, [ENCODER])
        server.stop()
        await heartbeat.stop()
    finally:
        await store.close()
        server.stop()


async def test_a_worker_is_not_registered_while_it_is_not_healthy(store):
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
    async with asyncio.timeout(45):
        await heartbeat.stop(withdraw=False)

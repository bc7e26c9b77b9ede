"""Loads from the real store into host copies, and the park table over them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.data.items import NAMESPACE, make_body, make_plan
from support.stores.server import StoreServer
from triptych.base.types import ItemPlan
from triptych.integrations.vllm.copy_loader import CopyLoader
from triptych.integrations.vllm.host_copies import CopyFolder, HostCopies
from triptych.integrations.vllm.options import ConnectorOptions
from triptych.integrations.vllm.park_table import LoadOutcome, LoadReport, NeededItem, ParkLimits, ParkTable
from triptych.store import keys
from triptych.store.embedding_store import EmbeddingStore

LIMIT = 1 << 20
PATIENCE = 30.0


def make_loader(url: str, folder: Path | None = None, **changed: object) -> CopyLoader:
    options = replace(ConnectorOptions(url, ("f" * 64, NAMESPACE)), **changed)
    copies = HostCopies(LIMIT, CopyFolder(str(folder)) if folder is not None else None)
    return CopyLoader(options, copies, row_width=32)


@pytest.fixture
def loader(store_url: str) -> Iterator[CopyLoader]:
    made = make_loader(store_url)
    yield made
    made.close()


def first(what: Callable[[], list[LoadReport]]) -> LoadReport:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if found := what():
            assert len(found) == 1
            return found[0]
        time.sleep(0.005)
    raise AssertionError(f"no report within {PATIENCE:g} s")


def loaded(loader: CopyLoader, plan: ItemPlan) -> LoadReport:
    loader.start(plan.mm_hash)
    return first(loader.reports)


async def saved(store: EmbeddingStore, plan: ItemPlan) -> bytes:
    body = make_body(plan)
    await store.save(plan, body, ttl=60)
    return body


async def test_a_stored_item_is_copied_with_its_plan(loader, store):
    plan = make_plan()
    body = await saved(store, plan)
    report = loaded(loader, plan)
    assert report.outcome is LoadOutcome.COPIED
    assert report.copy.plan == plan
    assert bytes(report.copy.memory) == body


async def test_a_copy_for_other_processes_is_a_file(store, store_url, tmp_path):
    plan = make_plan()
    body = await saved(store, plan)
    loader = make_loader(store_url, tmp_path)
    report = loaded(loader, plan)
    assert Path(report.copy.path).read_bytes() == body
    loader.close()
    loader.close()
    assert list(tmp_path.iterdir()) == []


async def test_a_value_of_another_namespace_is_a_miss(loader, store):
    plan = make_plan(namespace="e" * 64)
    await saved(store, plan)
    assert loaded(loader, plan).outcome is LoadOutcome.ABSENT


@pytest.mark.parametrize("at", [-1, 200])
async def test_a_damaged_value_is_a_miss_and_goes_so_that_it_can_be_stored_anew(loader, store, at):
    plan = make_plan(rows=100)
    body = await saved(store, plan)
    key = keys.embedding(plan.mm_hash)
    raw = bytearray(await store.control.execute("GET", key))
    position = len(raw) + at if at < 0 else len(raw) - len(body) + at
    raw[position] ^= 255
    await store.control.execute("SET", key, bytes(raw), "PX", 60_000)
    report = loaded(loader, plan)
    assert (report.outcome, report.reason) == (
        LoadOutcome.ABSENT,
        "its stored value is unusable: the checksum is wrong",
    )
    assert not await store.control.execute("EXISTS", key)
    assert loader._copies.used == 0
    await saved(store, plan)
    assert loaded(loader, plan).outcome is LoadOutcome.COPIED


async def test_an_item_larger_than_all_host_memory_says_its_size(loader, store):
    plan = make_plan(rows=LIMIT // 128 + 1)
    await saved(store, plan)
    report = loaded(loader, plan)
    assert (report.outcome, report.nbytes) == (LoadOutcome.NO_SPACE, plan.nbytes)
    assert "raise host_memory_bytes" in report.reason


async def test_full_host_memory_says_how_much_is_missing(loader, store):
    large, small = make_plan("large", rows=LIMIT // 128 - 1), make_plan("small", rows=3)
    for plan in (large, small):
        await saved(store, plan)
    held = loaded(loader, large)
    report = loaded(loader, small)
    assert (report.outcome, report.missing_bytes) == (LoadOutcome.NO_SPACE, 2 * 128)
    assert held.copy is not None
    loader.drop(held.copy)
    assert loaded(loader, small).outcome is LoadOutcome.COPIED


async def test_a_file_system_without_room_is_a_miss(store, store_url, tmp_path, monkeypatch):
    def full(file: int, start: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    plan = make_plan()
    await saved(store, plan)
    loader = make_loader(store_url, tmp_path)
    report = loaded(loader, plan)
    loader.close()
    assert report.outcome is LoadOutcome.ABSENT
    assert "raise the size of /dev/shm" in report.reason


def test_a_store_that_is_down_fails_loads_and_answers_when_it_is_back(tmp_path):
    server = StoreServer(tmp_path / "store")
    loader = make_loader(server.url)
    report = loaded(loader, make_plan())
    assert report.outcome is LoadOutcome.ABSENT
    assert "is not reachable" in report.reason
    server.start()
    try:
        assert loaded(loader, make_plan()).reason == "the store has no usable value of it"
        server.kill()
        assert "is not reachable" in loaded(loader, make_plan()).reason
        server.start()
        assert loaded(loader, make_plan()).reason == "the store has no usable value of it"
    finally:
        loader.close()
        server.kill()


async def test_more_requests_than_host_memory_holds_are_all_served_in_turn(loader, store):
    table = ParkTable(loader, ParkLimits(PATIENCE, 1.0, settle_steps=2, host_memory=LIMIT), time.monotonic)
    plans = [make_plan(f"item {number}", rows=LIMIT // 128 // 3) for number in range(24)]
    for plan in plans:
        await saved(store, plan)
    requests = {
        f"request {number}": [
            NeededItem(plan.mm_hash, plan.rows, False) for plan in plans[2 * number : 2 * number + 2]
        ]
        for number in range(12)
    }
    served = []
    while requests:
        for name, items in list(requests.items()):
            if table.ensure(name, items):
                for item in items:
                    assert table.has_copy(item.identifier)
                    table.use(item.identifier)
                table.ensure(name, [])
                table.finished(name)
                served.append(name)
                del requests[name]
        assert table.take_unavailable() == set()
        assert loader._copies.used <= LIMIT
        table.end_step()
        time.sleep(0.001)
    assert len(served) == 12

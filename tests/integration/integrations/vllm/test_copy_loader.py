"""Loads from the real store into host copies, and the park table over them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.data.items import NAMESPACE, make_body, make_plan
from support.engine.direct_pair import NOWHERE, Pair, entry, opened
from support.stores.server import StoreServer
from triptych.base.source_tickets import SourceTickets
from triptych.base.types import EmbeddingSource, ItemPlan, JsonObject
from triptych.ec_connector.connectors.direct_path import ServedOutput
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


TOKEN = "t" * 32
CALL = "a" * 32


def ticket(plan: ItemPlan, source: EmbeddingSource, token: str = TOKEN) -> dict[str, JsonObject]:
    return {plan.mm_hash: SourceTickets(token).entry(plan, source, CALL)}


@pytest.fixture
def pair() -> Iterator[Pair]:
    """An encoder worker that serves under the token; no store answers it."""
    with opened(NOWHERE, token=TOKEN) as made:
        yield made


@pytest.fixture
def without_store() -> Iterator[CopyLoader]:
    made = make_loader(NOWHERE, token=TOKEN)
    yield made
    made.close()


@pytest.mark.parametrize("path", ["shm", "peer"])
def test_an_item_is_read_at_its_encoder_worker_without_a_store(pair, without_store, path):
    item = entry(make_plan(rows=60))
    source = pair.offer(item)
    source = replace(source, address="") if path == "shm" else replace(source, socket="")
    without_store.note(f"generate-tokens-{CALL}-1", ticket(item.plan, source))
    report = loaded(without_store, item.plan)
    assert report.outcome is LoadOutcome.COPIED
    assert report.copy.plan == item.plan
    assert bytes(report.copy.memory) == item.data.numpy().tobytes()


@pytest.mark.parametrize(
    "why", ["another token", "another call", "another namespace", "it has ended", "no token"]
)
def test_a_source_is_taken_from_a_live_call_under_the_token_alone(pair, why):
    plan = make_plan(rows=60)
    if why == "another namespace":
        plan = replace(plan, namespace="e" * 64)
    loader = make_loader(NOWHERE, token="" if why == "no token" else TOKEN)
    try:
        call = "b" * 32 if why == "another call" else CALL
        params = ticket(plan, pair.offer(entry(plan)), "u" * 32 if why == "another token" else TOKEN)
        loader.note(call, params)
        if why == "it has ended":
            loader.forget(call)
        assert loaded(loader, plan).outcome is LoadOutcome.ABSENT
        assert not any(output.first_read.done() for output in _served(pair)), "nobody was asked"
    finally:
        loader.close()


def _served(pair: Pair) -> list[ServedOutput]:
    return list(pair.server.outputs._by_hash.values())


async def test_what_is_not_served_any_more_comes_from_the_store(pair, store, store_url):
    plan = make_plan(rows=60)
    gone = replace(pair.offer(entry(plan)), name="0" * 32)
    body = await saved(store, plan)
    loader = make_loader(store_url, token=TOKEN)
    try:
        loader.note(CALL, ticket(plan, gone))
        report = loaded(loader, plan)
        assert bytes(report.copy.memory) == body
    finally:
        loader.close()


def test_a_source_counts_while_one_of_its_calls_lives(pair, without_store):
    item = entry(make_plan(rows=60))
    source = pair.offer(item)
    for call in ("1", "2"):
        without_store.note(f"{CALL}-{call}", ticket(item.plan, source))
    without_store.forget(f"{CALL}-2")
    without_store.forget(f"{CALL}-2")
    assert loaded(without_store, item.plan).outcome is LoadOutcome.COPIED
    without_store.forget(f"{CALL}-1")
    assert not without_store._served and not without_store._noted


def test_rows_that_the_encoder_worker_changed_are_refused(pair, without_store):
    item = entry(make_plan(rows=60))
    source = pair.offer(item)
    (output,) = _served(pair)
    output.segment.memory[output.nbytes - 1] ^= 1
    without_store.note(CALL, ticket(item.plan, source))
    assert loaded(without_store, item.plan).outcome is LoadOutcome.ABSENT


def test_several_items_are_read_at_once(pair, without_store):
    items = [entry(make_plan(str(index), rows=30), index) for index in range(8)]
    for item in items:
        without_store.note(f"{CALL}-{item.plan.mm_hash}", ticket(item.plan, pair.offer(item)))
        without_store.start(item.plan.mm_hash)
    reports: list[LoadReport] = []
    deadline = time.monotonic() + PATIENCE
    while len(reports) < len(items) and time.monotonic() < deadline:
        reports += without_store.reports()
        time.sleep(0.005)
    copies = {report.identifier: bytes(report.copy.memory) for report in reports if report.copy is not None}
    assert copies == {item.plan.mm_hash: item.data.numpy().tobytes() for item in items}

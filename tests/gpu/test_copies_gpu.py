"""Copies and encoder graphs on a GPU."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from support.encoder_graphs.adapters import ADAPTERS, Adapter
from support.encoder_graphs.replays import ChangedTower, Replays, assert_rows, replays
from support.engine.engine_cell import Checkpoint, reference
from support.engine.failing_copies import fail_each_in_turn, fail_swaps_of_cross_tables, swapping_cell
from support.engine.prompts import SIX
from support.engine.tight_engine import ServerlessStore, mark_of, wide_feature
from support.engine.transfers import wait_for
from triptych.base.machine.device import Device
from triptych.base.machine.graphs import CudaGraph, GraphBackend
from triptych.base.types import ItemPlan
from triptych.ec_connector.base import ECTransferConfig, EncoderOutput
from triptych.ec_connector.connectors import host_buffers
from triptych.ec_connector.connectors.redis import RedisConnectorWorker
from triptych.ec_connector.metadata import Fetch, LoadId, TransferMetadata
from triptych.encoder_worker import host_copier
from triptych.integrations.vllm.host_copies import HostCopies, locked_pool
from triptych.integrations.vllm.rows import read_rows, source_of

pytestmark = pytest.mark.gpu

TOKENS = 24


def test_swapped_requests_answer_alike_whichever_copy_fails() -> None:
    checkpoint = Checkpoint.open("qwen3_vl", device="cuda")
    flags = {"block_size": 4, "max_model_len": 128, "max_num_batched_tokens": 64, "prefix_caching": False}
    fail_each_in_turn(
        lambda: swapping_cell(checkpoint, 40, **flags),
        lambda cell: cell.answer(SIX, TOKENS),
        [reference(checkpoint.path, prompt, TOKENS).token_ids for prompt in SIX],
        at_least=2,
    )


def test_swapped_cross_tables_answer_alike_whichever_copy_fails() -> None:
    fail_swaps_of_cross_tables("cuda")


@pytest.fixture
def worker() -> Iterator[RedisConnectorWorker]:
    """A worker role whose pool holds three items of four rows, and its store."""
    limit = 3 * wide_feature("any", 0, 4).plan.nbytes
    config = ECTransferConfig(store_url="unix:///none", device="cuda", host_buffer_bytes=limit)
    made = RedisConnectorWorker(config)
    made._client._store = ServerlessStore()  # type: ignore[assignment]
    yield made
    made.shutdown()


def test_items_come_to_the_device_through_one_pool_that_is_locked_once(worker, monkeypatch):
    store: Any = worker._client._store
    locks: list[int] = []
    monkeypatch.setattr(host_buffers, "PinnedMemory", lambda *_, **__: locks.append(1))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: locks.append(1))
    cache: dict[str, EncoderOutput] = {}
    for number in range(20):
        plan = wide_feature(f"item {number}", 0, 1 + number % 4).plan
        store.plans[plan.mm_hash] = plan
        worker.start_load_caches(TransferMetadata(1, fetches=(Fetch(plan, number),)), cache)
        wait_for(worker, lambda out: out.fetched)
        host = worker._loads._loads[plan.mm_hash].host
        assert host is not None and all(piece.is_pinned() for piece in host.pieces)
        copy = LoadId(plan.mm_hash, number)
        worker.start_load_caches(TransferMetadata(2, moves=(copy,)), cache)
        # Dropped while it may still be copied: its memory is given back when that is over.
        worker.start_load_caches(TransferMetadata(3, drops=(copy,)), cache)
        wait_for(worker, lambda out: out.loaded)
    deadline = time.monotonic() + 20
    while worker.host_bytes:
        assert time.monotonic() < deadline
        asyncio.run(asyncio.sleep(0.01))
    for entry in cache.values():
        assert entry.data.device.type == "cuda" and tuple(entry.data.shape) == (entry.plan.rows, 1024)
        part = entry.data.contiguous().view(torch.uint8)
        assert (part == mark_of(entry.plan)[0]).all()
    assert not locks, "no page is locked in the transfer loop"


@pytest.mark.parametrize("rows", [1, 40, 4000])
def test_tower_outputs_larger_than_the_staging_buffer_arrive_whole(rows, monkeypatch):
    monkeypatch.setattr(host_copier, "_STAGING_BYTES", 1 << 20)
    copier = host_copier.HostCopier(torch.device("cuda"))
    outputs = [torch.randn(rows + number, 512, device="cuda") for number in range(3)]
    for (copy, finite), output in zip(copier(outputs), outputs, strict=True):
        assert finite
        assert copy.device.type == "cpu" and torch.equal(copy, output.cpu())


EVERY = pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
DEVICE = "cuda"
#: Kernels of other shapes sum in another order.
ROUNDING = 1e-4


def backend() -> GraphBackend:
    return CudaGraph(torch.device(DEVICE))


def graphs_of(adapter: Adapter, **options: Any) -> Replays:
    return replays(adapter, backend=backend(), device=DEVICE, **options)


@EVERY
def test_padded_replays_equal_the_ordinary_call_for_each_number_of_items_at_each_budget(adapter):
    made = graphs_of(adapter, poisoned=True)
    for count in range(1, len(made.items) + 1):
        items = made.items[:count]
        wanted = made.eager(items)
        for budget in made.graphs:
            if sum(item.rows for item in items) <= budget:
                assert_rows(made.at(budget, items), wanted, ROUNDING)


@EVERY
def test_a_replay_follows_from_its_items_alone_and_what_it_gave_stays(adapter: Adapter) -> None:
    made = graphs_of(adapter)
    one, other = made.items[:2], made.items[2:]
    first = made.manager.encode(one)
    held = [rows.clone() for rows in first]
    made.manager.encode(other)
    again = made.manager.encode(one)
    for rows, before, after in zip(first, held, again, strict=True):
        assert torch.equal(rows, before) and torch.equal(rows, after)


@EVERY
def test_what_runs_between_two_replays_changes_neither(adapter: Adapter) -> None:
    """Larger replays share its pool's memory, ordinary calls and others the device's."""
    made = graphs_of(adapter, poisoned=True)
    small, large = made.items[:1], made.items
    minimum, maximum = min(made.graphs), max(made.graphs)
    first = made.at(minimum, small)
    for _ in range(3):
        assert_rows(made.at(maximum, large), made.eager(large), ROUNDING)
        junk = torch.full((1 << 24,), torch.nan, device=DEVICE)
        del junk
        gc.collect()
        torch.cuda.empty_cache()
        for rows, again in zip(first, made.at(minimum, small), strict=True):
            assert torch.equal(rows, again)


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_in_half_precision_a_replay_is_as_near_to_fp32_as_the_ordinary_call(adapter, dtype):
    exact = adapter.open(device=DEVICE, dtype=torch.float32)
    made = graphs_of(adapter, poisoned=True, dtype=dtype)
    reference = torch.cat(exact.encode(adapter.items(exact, len(made.items))))
    graphs, eager = (
        _error(torch.cat(rows), reference)
        for rows in (made.manager.encode(made.items), made.eager(made.items))
    )
    assert graphs <= 2 * eager + 1e-3, f"graphs {graphs:.4f}, ordinary call {eager:.4f}"


@EVERY
def test_a_replay_runs_no_code_of_the_tower(adapter: Adapter) -> None:
    encoder: Any = adapter.open(device=DEVICE)
    calls: list[int] = []

    def forward(values: dict[str, torch.Tensor]) -> Any:
        calls.append(1)
        return encoder.encoder_cudagraph_forward(values)

    made = graphs_of(adapter, tower=ChangedTower(encoder, encoder_cudagraph_forward=forward))
    captured = len(calls)
    assert_rows(made.manager.encode(made.items), made.eager(made.items), ROUNDING)
    assert len(calls) == captured, "the tower was called"


def _error(rows: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest difference, as a share of the largest element."""
    assert torch.isfinite(rows).all()
    return float((rows.float() - reference).abs().max() / reference.abs().max())


def test_rows_for_vllm_come_from_page_locked_pieces_beside_the_model() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    pool = locked_pool(1 << 24, device)
    assert pool is not None
    copies, stream = HostCopies(1 << 24, pool=pool), Device.of(device).copy_stream()
    for number in range(8):
        rows = torch.randn(512, 1024).to(torch.bfloat16)
        plan = ItemPlan("a" * 64, "b" * 64, "image", 512, 1024, "bfloat16", 512)
        copy = copies.allocate(plan)
        assert not isinstance(copy, int)
        start = 0
        for piece in copy.pieces:
            piece.copy_(rows.view(torch.uint8).reshape(-1)[start : start + piece.numel()])
            start += piece.numel()
        read = read_rows(source_of(copy), device, torch.bfloat16, stream)
        assert torch.equal(read.cpu(), rows), number
        copies.free(copy)

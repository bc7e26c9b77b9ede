"""Copies between a CUDA device and the host: of embeddings, of preempted requests, of tower outputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from support.engine.engine_cell import Checkpoint, reference
from support.engine.failing_copies import fail_each_in_turn, fail_swaps_of_cross_tables, swapping_cell
from support.engine.prompts import SIX
from support.engine.tight_engine import ServerlessStore, mark_of, wide_feature
from support.engine.transfers import wait_for
from triptych.ec_connector.base import ECTransferConfig, EncoderOutput
from triptych.ec_connector.connectors import host_buffers
from triptych.ec_connector.connectors.redis import RedisConnectorWorker
from triptych.ec_connector.metadata import Fetch, LoadId, TransferMetadata
from triptych.encoder_worker import host_copier

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

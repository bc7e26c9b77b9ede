"""The engine with the Redis connector and a real server: loads, losses, and repeated use."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch

from support.engine.engine_cell import Checkpoint, EngineCell, Prompt, engine_cell, reference
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.core.request_events import ItemLoaded, ItemMissing, RequestFinished
from triptych.store.embedding_store import EmbeddingStore

ONE = Prompt("What is this?", ((1, 96, 64),))


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    torch.set_num_threads(1)
    return Checkpoint.open("qwen3_vl")


@pytest.fixture
async def cell(checkpoint: Checkpoint, store_url: str, store: EmbeddingStore) -> AsyncIterator[EngineCell]:
    """An engine whose connector is the one of production; `store` has emptied the server."""
    with engine_cell(checkpoint, url=store_url, connector="redis") as running:
        yield running


async def save(cell: EngineCell, store: EmbeddingStore, request: EngineRequest) -> None:
    for feature in request.features:
        data = cell.checkpoint.rows(feature.mm_hash)
        await store.save(feature.plan, memoryview(data.numpy()).cast("B"), ttl=60.0)


def make(cell: EngineCell, *, ready: bool) -> tuple[EngineRequest, list[int]]:
    result = reference(cell.checkpoint.path, ONE, 8)
    request = cell.request(ONE, result.prompt_token_ids, 8, publish=False)
    if ready:
        request.ready = frozenset(feature.mm_hash for feature in request.features)
    return request, result.token_ids


async def test_an_embedding_in_the_store_is_loaded_and_answers_right(
    cell: EngineCell, store: EmbeddingStore
) -> None:
    request, expected = make(cell, ready=True)
    await save(cell, store, request)
    assert cell.finish([request]) == [expected]
    assert cell.wait(request.request_id, ItemLoaded).seconds > 0
    assert cell.metric("triptych_ec_load_bytes_total") == request.features[0].plan.nbytes
    cell.assert_at_rest()


async def test_a_damaged_value_is_reported_with_its_digest_and_replaced(
    cell: EngineCell, store: EmbeddingStore
) -> None:
    request, expected = make(cell, ready=True)
    plan = request.features[0].plan
    broken = bytearray(plan.nbytes)
    await save(cell, store, request)
    keys = await store.control.execute("KEYS", f"*{plan.mm_hash}*")
    length = await store.control.execute("STRLEN", keys[0])
    await store.control.execute("SETRANGE", keys[0], length - 8, bytes(broken[:8]))
    cell.engine.submit(request)
    missing = cell.wait(request.request_id, ItemMissing)
    assert len(missing.damaged_digest) == 40
    data = cell.checkpoint.rows(plan.mm_hash)
    body = memoryview(data.numpy()).cast("B")
    await store.save(plan, body, ttl=60.0, damaged_digest=missing.damaged_digest)
    cell.engine.items_ready([plan.mm_hash])
    cell.wait(request.request_id, RequestFinished)
    assert cell.tokens(request.request_id) == expected
    cell.assert_at_rest()

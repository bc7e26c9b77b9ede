"""Prompts prefilled between two of their pictures in a real engine: transformers' `generate`'s tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.data.oracle import assert_exact
from support.engine.engine_cell import Checkpoint, EngineCell, Prompt, engine_cell, reference
from support.engine.prompts import THREE
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.core.request_events import ItemMissing, RequestAdmitted, RequestFinished

TOKENS, BLOCK = 24, 4
EARLY = "triptych_pd_overlap_tokens_total"


@contextmanager
def overlap_cell(family: str = "qwen3_vl", **flags: Any) -> Iterator[EngineCell]:
    """An engine of small steps and blocks, which leaves nothing behind."""
    options = {"overlap_prefill": True, "max_num_batched_tokens": 33, "block_size": BLOCK, **flags}
    with engine_cell(Checkpoint.open(family), **options) as cell:
        yield cell
        cell.assert_at_rest()


def pending(cell: EngineCell, prompt: Prompt) -> EngineRequest:
    """A submitted request of whose pictures none is in the store."""
    token_ids = reference(cell.checkpoint.path, prompt, TOKENS).prompt_token_ids
    request = cell.request(prompt, token_ids, TOKENS, publish=False)
    cell.engine.submit(request)
    cell.wait(request.request_id, RequestAdmitted)
    return request


def comes(cell: EngineCell, request: EngineRequest, index: int, *, stored: bool = True) -> None:
    feature = request.features[index]
    if stored:
        cell.checkpoint.publish(cell.store, [feature])
    cell.engine.items_ready([feature.mm_hash])


def prefilled_before(cell: EngineCell, request: EngineRequest, index: int) -> None:
    """Waits until all full blocks before the item are computed; the request holds nothing then."""
    tokens = request.features[index].placement.offset // BLOCK * BLOCK
    deadline = time.monotonic() + cell.patience
    while cell.metric(EARLY) < tokens:
        assert time.monotonic() < deadline, f"{cell.metric(EARLY):.0f} of {tokens} tokens are prefilled"
        time.sleep(0.005)
    assert cell.metric(EARLY) == tokens
    assert cell.metric("triptych_pd_kv_blocks_used") == cell.metric("vllm:num_requests_running") == 0


def exact(cell: EngineCell, request: EngineRequest, prompt: Prompt, *, cached: int = 0) -> None:
    done = cell.wait(request.request_id, RequestFinished)
    assert done.error is None and done.usage.cached_tokens == cached
    expected = reference(cell.checkpoint.path, prompt, TOKENS)
    assert_exact([expected], [cell.tokens(request.request_id)], min_distinct=10)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "llava"])
def test_a_prompt_prefilled_up_to_each_missing_picture_in_turn_is_exact(family: str) -> None:
    with overlap_cell(family) as cell:
        request = pending(cell, THREE)
        for index in range(3):
            prefilled_before(cell, request, index)
            comes(cell, request, index)
        exact(cell, request, THREE)
        assert cell.metric("triptych_pd_overlap_requests_total") == 1


def test_a_picture_lost_in_the_gap_is_reported_and_its_return_is_exact() -> None:
    with overlap_cell() as cell:
        request = pending(cell, THREE)
        comes(cell, request, 0)
        prefilled_before(cell, request, 1)
        comes(cell, request, 1, stored=False)
        assert cell.wait(request.request_id, ItemMissing).mm_hash == request.features[1].mm_hash
        comes(cell, request, 1)
        prefilled_before(cell, request, 2)
        comes(cell, request, 2)
        exact(cell, request, THREE)

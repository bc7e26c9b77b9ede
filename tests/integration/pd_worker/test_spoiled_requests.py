"""A request whose numbers are none ends with an error, and nobody else ever reads them."""

from __future__ import annotations

import pytest
import torch

from support.engine_cell import Checkpoint, EngineCell, Prompt, engine_cell, reference
from triptych.config import MIB
from triptych.ec_connector.base import EncoderOutput
from triptych.errors import InternalError
from triptych.pd_worker.outputs import RequestFinished

SPOILED = Prompt("What is this?", ((1, 96, 64),))
OTHERS = [
    Prompt("Say something about the weather, and then about the sea."),
    Prompt("And this?", ((2, 64, 96),)),
    Prompt("One more."),
]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    torch.set_num_threads(1)
    return Checkpoint.open("qwen3_vl")


def spoil(cell: EngineCell, value: float) -> str:
    """Submits a request with one such value in the last row of its picture; the request's id."""
    token_ids = reference(cell.checkpoint.path, SPOILED, 8).prompt_token_ids
    request = cell.request(SPOILED, token_ids, 8)
    [feature] = request.features
    rows = cell.checkpoint.rows(feature.mm_hash).clone()
    rows[-1, 3] = value
    cell.store[feature.mm_hash] = EncoderOutput(feature.plan, rows)
    cell.engine.submit(request)
    return request.request_id


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("budget", [32, 512], ids=["in chunks", "at once"])
def test_others_beside_it_and_after_it_in_its_blocks_are_exact(
    checkpoint: Checkpoint, value: float, budget: int
) -> None:
    expected = [reference(checkpoint.path, prompt, 8).token_ids for prompt in OTHERS]
    # Few blocks: those of the spoiled request are soon somebody else's.
    flags = {"max_num_batched_tokens": budget, "kv_memory": MIB // 2, "prefix_caching": False}
    with engine_cell(checkpoint, **flags) as cell:
        for _ in range(3):
            name = spoil(cell, value)
            assert cell.answer(OTHERS, 8) == expected
            error = cell.wait(name, RequestFinished).error
            assert isinstance(error, InternalError) and "no number" in str(error)
        cell.assert_at_rest()
        cache = cell.engine.runner.kv_cache
        assert all(tensor.isfinite().all() for tensor in (*cache.keys, *cache.values))

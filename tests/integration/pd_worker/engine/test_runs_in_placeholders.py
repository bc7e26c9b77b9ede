"""Placeholders of which only some tokens take an embedding (`is_embed`), as runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from support.data.oracle import assert_exact
from support.engine.engine_cell import Checkpoint, EngineCell, Prompt, engine_cell, reference
from triptych.base.types import MMFeature, Placement
from triptych.ec_connector.base import EncoderOutput
from triptych.pd_worker.core.request import EngineRequest

TWO = Prompt("Compare these two.", ((1, 96, 64), (3, 64, 64)))
TOKENS = 24
#: Tokens before and behind the embeddings that belong to the span: those that open and close an image.
BRACKET = 1


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Checkpoint]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Checkpoint.open("qwen3_vl")
    torch.set_num_threads(threads)


def bracketed(cell: EngineCell, shift: int) -> EngineRequest:
    """TWO, with spans that include their brackets; embeddings in two runs, `shift` tokens off."""
    request = cell.request(TWO, reference(cell.checkpoint.path, TWO, TOKENS).prompt_token_ids, TOKENS)
    request.features = tuple(_bracket(cell, feature, shift) for feature in request.features)
    return request


def _bracket(cell: EngineCell, feature: MMFeature, shift: int) -> MMFeature:
    rows = feature.plan.rows
    first = rows // 3
    runs = ((BRACKET + shift, first), (BRACKET + shift + first, rows - first))
    plan = replace(feature.plan, length=rows + 2 * BRACKET, runs=runs)
    cell.store[plan.mm_hash] = EncoderOutput(plan, cell.store[plan.mm_hash].data)
    return MMFeature(plan, Placement(feature.placement.offset - BRACKET, plan.length, runs))


@pytest.mark.parametrize("budget", [11, 4096])
def test_embeddings_in_runs_inside_a_longer_span_match(checkpoint: Checkpoint, budget: int) -> None:
    with engine_cell(checkpoint, max_num_batched_tokens=budget) as cell:
        outputs = cell.finish([bracketed(cell, 0)])
        assert_exact([reference(checkpoint.path, TWO, TOKENS)], outputs, min_distinct=10)
        cell.assert_at_rest()


@pytest.mark.parametrize("shift", [-1, 1])
def test_mutant_is_embed_shifted_by_one_changes_the_output(checkpoint: Checkpoint, shift: int) -> None:
    with engine_cell(checkpoint) as cell:
        (output,) = cell.finish([bracketed(cell, shift)])
        assert output != reference(checkpoint.path, TWO, TOKENS).token_ids

"""Classes with recurrent layers and pictures under the adapter: exact in chunks, cached and preempted."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest

from support.engine.engine_cell import EngineCell, engine_cell
from support.zoo.checkpoint import model_of
from support.zoo.engine import Served
from support.zoo.models import RECIPES, Prompt, generate, make_prompt
from triptych.base.config import MIB

TOKENS = 24
NAMES = (
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "MiniCPMV4_6ForConditionalGeneration",
    "Lfm2VlForConditionalGeneration",
    "Lfm3VlForConditionalGeneration",
)


@pytest.fixture(scope="module", params=NAMES)
def served(request: pytest.FixtureRequest) -> Served:
    return Served.open(request.param)


@functools.cache
def prompts_of(name: str) -> list[Prompt]:
    """One picture, two, none, and one once more with another text."""
    return [
        make_prompt(RECIPES[name], seed, items)
        for seed, items in ((1, (0,)), (22, (1, 2)), (18, ()), (9, (0,)))
    ]


@functools.cache
def expected(name: str, index: int, count: int) -> list[int]:
    reference = generate(RECIPES[name], model_of(name), prompts_of(name)[index], count)
    assert len(set(reference.token_ids)) > len(reference.token_ids) // 2, "too few tokens to show anything"
    return reference.token_ids


def answers(cell: EngineCell, served: Served, indices: Sequence[int], count: int) -> list[list[int]]:
    prompts = prompts_of(served.recipe.name)
    return cell.finish([served.request(cell, prompts[index], count) for index in indices])


def assert_exact(cell: EngineCell, served: Served, indices: Sequence[int], count: int = TOKENS) -> None:
    for index, got in zip(indices, answers(cell, served, indices, count), strict=True):
        reference = expected(served.recipe.name, index, count)
        assert got[: len(reference)] == reference


@pytest.mark.parametrize("budget", [1, 7, 16])
def test_pictures_in_chunks_and_batches_are_answered_as_by_generate(served: Served, budget: int) -> None:
    with engine_cell(served, max_num_batched_tokens=budget) as cell:
        assert_exact(cell, served, (0, 1, 2, 3))
        cell.assert_at_rest()


def test_an_equal_prompt_with_pictures_goes_on_from_a_snapshot(served: Served) -> None:
    length = len(prompts_of(served.recipe.name)[1].token_ids)
    with engine_cell(served, block_size=4) as cell:
        for _ in range(2):
            assert_exact(cell, served, [1])
        assert cell.metric("vllm:prefix_cache_hits_total") == (length - 1) // 4 * 4
        assert cell.metric("triptych_pd_state_snapshots") == 1
        cell.assert_at_rest()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_pictures_are_answered_as_by_generate(served: Served, preemption: str) -> None:
    geometry = served.decoder.geometry
    memory = 34 * 4 * geometry.token_elements * 4
    flags: dict[str, Any] = {"block_size": 4, "max_model_len": 128, "kv_memory": memory, "swap_memory": MIB}
    with engine_cell(served, preemption=preemption, **flags) as cell:
        assert_exact(cell, served, (0, 1, 2, 3), 2 * TOKENS)
        assert cell.metric("vllm:num_preemptions_total") > 0
        assert (cell.metric("triptych_pd_swapped_blocks_total") > 0) is (preemption == "swap")
        cell.assert_at_rest()


def test_without_its_states_a_model_answers_otherwise(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: equality above is not that of a model for which states do not matter."""
    monkeypatch.setattr(
        "triptych.pd_worker.runner.state_pool.StatePool.end",
        lambda self, chunks, states: [tensor.zero_() for tensor in self._slots.values()],
    )
    with engine_cell(served, max_num_batched_tokens=7) as cell:
        for index, got in enumerate(answers(cell, served, (0, 1, 2), TOKENS)):
            reference = expected(served.recipe.name, index, TOKENS)
            assert got[: len(reference)] != reference

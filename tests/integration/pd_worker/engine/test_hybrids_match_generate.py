"""Classes with recurrent layers and pictures under the adapter: exact in chunks, cached and preempted."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import pytest

from support.engine.engine_cell import EngineCell, engine_cell
from support.matrix import matrix
from support.zoo.checkpoint import model_of
from support.zoo.engine import Served
from support.zoo.models import RECIPES, Prompt, generate, make_prompt
from support.zoo.recipe import text
from triptych.base.config import MIB
from triptych.models.geometry import DecoderGeometry
from triptych.models.recurrent import RecurrentStates
from triptych.pd_worker.core.request import EngineRequest

TOKENS = 24
EARLY, LOST = "triptych_pd_overlap_tokens_total", "triptych_pd_overlap_lost_tokens_total"
NAMES = tuple(
    f"{family}ForConditionalGeneration"
    for family in ("Qwen3_5", "Lfm2Vl", "Qwen3_5Moe", "MiniCPMV4_6", "Lfm3Vl")
)


@pytest.fixture(scope="module", params=matrix(NAMES, quick=2))
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


def wait_until_early(cell: EngineCell, tokens: int) -> None:
    """Returns once so many tokens are prefilled before their request could start."""
    deadline = time.monotonic() + cell.patience
    while cell.metric(EARLY) < tokens:
        assert time.monotonic() < deadline, f"{cell.metric(EARLY):.0f} of {tokens} tokens are prefilled"
        time.sleep(0.005)


@pytest.mark.parametrize("budget", [2, 7, 16])
def test_pictures_in_chunks_and_batches_are_answered_as_by_generate(served: Served, budget: int) -> None:
    with engine_cell(served, max_num_batched_tokens=budget) as cell:
        assert_exact(cell, served, (0, 1, 2, 3))
        cell.assert_at_rest()


def test_an_equal_prompt_with_pictures_goes_on_from_a_snapshot(served: Served) -> None:
    behind = len(prompts_of(served.recipe.name)[1].token_ids) - 4
    with engine_cell(served, block_size=4) as cell:
        for _ in range(2):
            assert_exact(cell, served, [1])
        assert cell.metric("vllm:prefix_cache_hits_total") == behind // 4 * 4
        assert cell.metric("triptych_pd_state_snapshots") == 1
        cell.assert_at_rest()


WORDS = pytest.mark.parametrize("words", [4, 40], ids=["short", "long"])


def assert_second_question_goes_on(served: Served, words: int) -> None:
    """Of two pictures, with questions of so many tokens behind them."""
    recipe, first = served.recipe, prompts_of(served.recipe.name)[1]
    behind = len(first.token_ids) - 4
    questions = [
        Prompt([*first.token_ids[:behind], *range(20 + 60 * at, 20 + 60 * at + words)], first.items)
        for at in range(2)
    ]
    with engine_cell(served, block_size=4) as cell:
        for question in questions:
            expected = generate(recipe, model_of(recipe.name), question, TOKENS).token_ids
            (got,) = cell.finish([served.request(cell, question, TOKENS)])
            assert got[: len(expected)] == expected
        # A snapshot ends with a block: what the picture has of the next one is computed again.
        assert cell.metric("vllm:prefix_cache_hits_total") == behind // 4 * 4
        cell.assert_at_rest()


@WORDS
def test_the_second_question_about_pictures_goes_on_behind_the_last_one(served: Served, words: int) -> None:
    assert_second_question_goes_on(served, words)


def test_so_it_does_where_layers_keep_no_state_inside_a_chunk(served, monkeypatch):
    """Each piece of a chunk is a forward of its own then."""
    monkeypatch.setattr(DecoderGeometry, "keeps_inside", False)
    monkeypatch.setattr(RecurrentStates, "check_kept", check_none_inside)
    assert_second_question_goes_on(served, 40)


def check_none_inside(states: RecurrentStates) -> None:
    assert not states._kept


_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}


@WORDS
@pytest.mark.parametrize(
    "decoder",
    [
        text("bamba", hidden_size=32, attn_layer_indices=[1], num_hidden_layers=3, mamba_expand=2, **_MAMBA),
        text("falcon_h1", mamba_d_ssm=64, mamba_expand=2, **_MAMBA),
    ],
    ids=lambda decoder: decoder["model_type"],
)
def test_so_it_does_with_mamba_layers_that_no_list_names(decoder, words, monkeypatch):
    llava = RECIPES["LlavaForConditionalGeneration"]
    config = {**llava.config, "text_config": decoder}
    recipe = dataclasses.replace(llava, config=config, variation=decoder["model_type"])
    monkeypatch.setitem(RECIPES, recipe.name, recipe)
    assert_second_question_goes_on(Served.open(recipe.name), words)


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


def test_a_prompt_prefilled_before_its_second_picture_comes_is_exact(served: Served) -> None:
    prompt = prompts_of(served.recipe.name)[1]
    with engine_cell(served, overlap_prefill=True, block_size=4, max_num_batched_tokens=33) as cell:
        request = served.request(cell, prompt, TOKENS)
        second = request.features[1]
        output = cell.store.pop(second.mm_hash)
        request.ready -= {second.mm_hash}
        cell.engine.submit(request)
        wait_until_early(cell, second.placement.offset // 4 * 4)
        assert cell.metric("triptych_pd_state_slots_used") == 0, "a request that waits has no slot"
        cell.store[second.mm_hash] = output
        cell.engine.items_ready([second.mm_hash])
        cell.wait(request.request_id, "finished")
        reference = expected(served.recipe.name, 1, TOKENS)
        assert cell.tokens(request.request_id)[: len(reference)] == reference
        assert cell.metric(LOST) == 0
        cell.assert_at_rest()


def test_choices_of_one_prompt_are_those_of_their_seeds_alone_or_together(served: Served) -> None:
    prompt = prompts_of(served.recipe.name)[1]

    def choices(cell: EngineCell) -> list[EngineRequest]:
        requests = [served.request(cell, prompt, TOKENS) for _ in range(3)]
        for choice, request in enumerate(requests):
            request.sampling = dataclasses.replace(request.sampling, temperature=1.0, seed=7, choice=choice)
        return requests

    with engine_cell(served, block_size=4) as cell:
        together = cell.finish(choices(cell))
        one_by_one = [cell.finish([request])[0] for request in choices(cell)]
    assert together == one_by_one
    assert len({tuple(tokens) for tokens in together}) == 3


def test_without_its_states_a_model_answers_otherwise(served, monkeypatch):
    """The control: equality above is not that of a model for which states do not matter."""
    monkeypatch.setattr(
        "triptych.pd_worker.runner.state_pool.StatePool.end",
        lambda self, chunks, states: [tensor.zero_() for tensor in self._slots.values()],
    )
    with engine_cell(served, max_num_batched_tokens=7) as cell:
        for index, got in enumerate(answers(cell, served, (0, 1, 2), TOKENS)):
            reference = expected(served.recipe.name, index, TOKENS)
            assert got[: len(reference)] != reference

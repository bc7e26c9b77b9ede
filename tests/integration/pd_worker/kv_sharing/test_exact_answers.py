"""A worker that loads the KV blocks of another answers as `generate`, and has not computed them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest

from support.engine.engine_cell import EngineCell
from support.engine.sharing import (
    BLOCK_SIZE,
    COMPUTED,
    HITS,
    LOADED,
    LOADED_BYTES,
    SAVED,
    SAVED_BYTES,
    blocks_of,
    new_root,
    rooted,
    sharing_cell,
    wait_for_saves,
)
from support.matrix import matrix
from support.zoo.checkpoint import model_of
from support.zoo.engine import Served
from support.zoo.models import RECIPES, Prompt, generate, make_prompt
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.kv_sharing.kv_copier import KVCopier

TOKENS = 24
#: DeepStack and M-RoPE; spans and windows; experts.
ATTENTIVE = ("Qwen3VL", "Gemma3", "Qwen3VLMoe")
#: With recurrent layers.
HYBRID = ("Qwen3_5", "Lfm2Vl")


def open_class(name: str) -> Served:
    return Served.open(f"{name}ForConditionalGeneration")


@functools.cache
def prompts_of(name: str) -> list[Prompt]:
    """One picture, two, none, and one once more with another text."""
    seeds = ((1, (0,)), (22, (1, 2)), (18, ()), (9, (0,)))
    return [make_prompt(RECIPES[name], seed, items) for seed, items in seeds]


@functools.cache
def expected(name: str, index: int) -> list[int]:
    reference = generate(RECIPES[name], model_of(name), prompts_of(name)[index], TOKENS)
    # Few in some classes: the control below shows that they answer otherwise with other blocks.
    assert len(set(reference.token_ids)) > 4, "too few tokens to show anything"
    return reference.token_ids


def requests_of(cell: EngineCell, served: Served, root: bytes) -> Sequence[EngineRequest]:
    prompts = prompts_of(served.recipe.name)
    return rooted([served.request(cell, prompt, TOKENS) for prompt in prompts], root)


def assert_exact(served: Served, outputs: list[list[int]]) -> None:
    for index, got in enumerate(outputs):
        reference = expected(served.recipe.name, index)
        assert got[: len(reference)] == reference


def differs(served: Served, outputs: list[list[int]]) -> bool:
    name = served.recipe.name
    return any(got[: len(expected(name, i))] != expected(name, i) for i, got in enumerate(outputs))


@pytest.mark.parametrize("name", matrix(ATTENTIVE))
def test_a_second_worker_answers_as_generate_and_computes_only_the_open_block(name, store_url):
    served, root = open_class(name), new_root()
    with sharing_cell(served, store_url, max_num_batched_tokens=33) as cell:
        requests = requests_of(cell, served, root)
        assert_exact(served, cell.finish(requests))
        wait_for_saves(cell)
        assert cell.metric(SAVED) >= BLOCK_SIZE * len(blocks_of(requests, last=0))
        assert cell.metric(LOADED) == 0
    with sharing_cell(served, store_url, max_num_batched_tokens=33) as cell:
        requests = requests_of(cell, served, root)
        assert_exact(served, cell.finish(requests))
        full = sum((request.num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE for request in requests)
        assert cell.metric(LOADED) == BLOCK_SIZE * len(blocks_of(requests, last=0))
        assert cell.metric(HITS) == full
        assert cell.metric(COMPUTED) == sum(request.num_prompt_tokens for request in requests) - full
        assert cell.metric(SAVED) == 0, "what was loaded is not saved again"
        cell.assert_at_rest()


@pytest.mark.parametrize("name", matrix(HYBRID))
def test_a_hybrid_goes_on_from_a_state_that_another_worker_has_saved(name, store_url):
    served, root = open_class(name), new_root()
    with sharing_cell(served, store_url) as cell:
        assert_exact(served, cell.finish(requests_of(cell, served, root)))
        wait_for_saves(cell)
    with sharing_cell(served, store_url) as cell:
        for index, request in enumerate(requests_of(cell, served, root)):
            hits = cell.metric(HITS)
            (got,) = cell.finish([request])
            reference = expected(served.recipe.name, index)
            assert got[: len(reference)] == reference
            # Shorter ones have no snapshot.
            if request.num_prompt_tokens > 5 * BLOCK_SIZE:
                full = (request.num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
                assert cell.metric(HITS) - hits == full
        assert cell.metric(LOADED) > 0
        cell.assert_at_rest()


@pytest.mark.parametrize("name", matrix(ATTENTIVE))
def test_blocks_in_a_wrong_order_would_show(name, store_url, monkeypatch):
    """The control: equality above is not that of a model for which its keys do not matter."""
    served, root = open_class(name), new_root()
    with sharing_cell(served, store_url) as cell:
        cell.finish(requests_of(cell, served, root))
        wait_for_saves(cell)
    put = KVCopier.put
    monkeypatch.setattr(
        KVCopier, "put", lambda self, blocks, rows, which: put(self, blocks[::-1], rows, which)
    )
    with sharing_cell(served, store_url) as cell:
        assert differs(served, cell.finish(requests_of(cell, served, root)))
        assert cell.metric(LOADED) > 0


def test_equal_prompts_at_once_are_loaded_once(store_url):
    served, root = open_class("Qwen3VL"), new_root()
    with sharing_cell(served, store_url) as cell:
        cell.finish(requests_of(cell, served, root))
        wait_for_saves(cell)
        saved = cell.metric(SAVED_BYTES)
    with sharing_cell(served, store_url) as cell:
        outputs = [cell.finish([*requests_of(cell, served, root), *requests_of(cell, served, root)])]
        assert_exact(served, outputs[0][:4])
        assert outputs[0][4:] == outputs[0][:4]
        assert cell.metric(LOADED_BYTES) == saved


def test_a_hybrids_equal_prompt_asks_for_nothing_that_is_here(store_url):
    served, root = open_class("Lfm2Vl"), new_root()
    with sharing_cell(served, store_url) as cell:
        for _ in range(2):
            cell.finish(requests_of(cell, served, root)[1:2])
            wait_for_saves(cell)
        assert cell.metric(HITS) > 0
        assert cell.metric(LOADED_BYTES) == 0


def test_another_tenant_finds_nothing(store_url):
    served = open_class("Qwen3VL")
    for _ in range(2):
        with sharing_cell(served, store_url) as cell:
            assert_exact(served, cell.finish(requests_of(cell, served, new_root())))
            wait_for_saves(cell)
            assert cell.metric(LOADED) == 0

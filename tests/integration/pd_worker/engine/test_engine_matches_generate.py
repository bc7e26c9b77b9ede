"""Tokens of the engine are those of `generate`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from support.data.checkpoints import FAMILIES as ALL_FAMILIES
from support.data.oracle import assert_exact, teacher_forced_logits
from support.engine.engine_cell import Checkpoint, EngineCell, Prompt, engine_cell, reference
from support.engine.engine_events import kind
from support.engine.prompts import CAT, DOG, MIXED, ONE, TEXT, THREE, TWICE
from support.matrix import matrix
from triptych.ec_connector.base import EncoderOutput
from triptych.models.weights.prepack import PrepackedLinear
from triptych.models.weights.product_choice import choose_products
from triptych.pd_worker.core.request import EngineRequest

SMALL = Prompt("What is this?", ((5, 48, 48),))
FAMILIES = ["qwen3_vl", "qwen2_5_vl", "llava"]
#: Different tokens that a reference of this length must have: fewer would prove little.
_DISTINCT = {8: 5, 24: 10, 64: 20}


@pytest.mark.parametrize("family", matrix(FAMILIES))
def test_prepacked_layers_answer_alike(family: str, prepack_all: None) -> None:
    with engine_cell(Checkpoint.open(family), max_num_batched_tokens=33) as cell:
        assert_matches(cell, MIXED, cell.answer(MIXED, 24))


def assert_matches(cell: EngineCell, prompts: list[Prompt], outputs: list[list[int]]) -> None:
    length = len(outputs[0])
    results = [reference(cell.checkpoint.path, prompt, length) for prompt in prompts]
    assert_exact(results, outputs, min_distinct=_DISTINCT[length])


def differs(cell: EngineCell, prompts: list[Prompt], outputs: list[list[int]]) -> bool:
    return any(
        output != reference(cell.checkpoint.path, prompt, len(output)).token_ids
        for prompt, output in zip(prompts, outputs, strict=True)
    )


@pytest.mark.parametrize(
    ("family", "backend"),
    [("qwen3_vl", "sdpa"), ("qwen2_5_vl", "sdpa"), ("llava", "sdpa"), ("qwen3_vl", "cpu")],
)
def test_mixed_prompts_match_over_64_tokens_in_every_family(family: str, backend: str) -> None:
    flags = {"max_num_batched_tokens": 33, "block_size": 8, "attention_backend": backend}
    with engine_cell(Checkpoint.open(family), **flags) as cell:
        assert_matches(cell, MIXED, cell.answer(MIXED, 64))
        assert cell.metric("triptych_pd_chunked_prefills_total") > 0
        assert cell.metric("triptych_pd_batch_requests_sum") > cell.metric("triptych_pd_batch_requests_count")
        cell.assert_at_rest()


@pytest.mark.parametrize(("budget", "block_size"), matrix([(16, 8), (33, 16), (4096, 8)], quick=2))
def test_token_budget_and_block_size_change_nothing(checkpoint, budget, block_size):
    with engine_cell(checkpoint, max_num_batched_tokens=budget, block_size=block_size) as cell:
        assert_matches(cell, MIXED, cell.answer(MIXED, 24))
        # Again: now with a prefix that the first round has left.
        assert_matches(cell, MIXED, cell.answer(MIXED, 24))
        assert cell.metric("vllm:prefix_cache_hits_total") > 0
        ends = [event.finished for event in cell.events if kind(event) == "finished"]
        assert all(event.cached_tokens > 0 for event in ends[-len(MIXED) :])
        cell.assert_at_rest()


def test_a_chunk_boundary_at_every_offset_of_an_image_changes_nothing(checkpoint: Checkpoint) -> None:
    prompt_ids = reference(checkpoint.path, SMALL, 8).prompt_token_ids
    (feature,) = checkpoint.features(prompt_ids, SMALL)
    start, end = feature.placement.offset, feature.placement.end
    assert end - start >= 6
    for budget in range(start + 1, end + 1):
        with engine_cell(checkpoint, max_num_batched_tokens=budget, prefix_caching=False) as cell:
            assert_matches(cell, [SMALL], cell.answer([SMALL], 8))


@pytest.mark.parametrize("budget", [7, 4096], ids=["in pieces", "beside a picture from its start"])
def test_a_cached_prefix_that_ends_inside_a_picture_leaves_the_other_rows_of_every_level(checkpoint, budget):
    """Rows of the deepstack levels are those of the chunk, however much of the picture is cached."""
    prompt = Prompt("Compare the two.", (CAT, DOG))
    prompt_ids = reference(checkpoint.path, prompt, 24).prompt_token_ids
    place = checkpoint.features(prompt_ids, prompt)[-1].placement
    tokens = len(prompt_ids) - 1  # the last one is always computed
    cached, block_size = next(
        (tokens // size * size, size)
        for size in range(8, tokens)
        if place.offset + 1 < tokens // size * size < place.end - 1
    )
    flags = {"max_num_batched_tokens": budget, "block_size": block_size}
    with engine_cell(checkpoint, **flags) as cell:
        assert_matches(cell, [prompt], cell.answer([prompt], 24))
        before = len(cell.events)
        together = [prompt, THREE, TEXT]
        assert_matches(cell, together, cell.answer(together, 24))
        ends = [event.finished for event in cell.events[before:] if kind(event) == "finished"]
        assert max(event.cached_tokens for event in ends) == cached
        cell.assert_at_rest()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_requests_answer_alike(checkpoint: Checkpoint, preemption: str) -> None:
    geometry = checkpoint.decoder.geometry
    block = 2 * geometry.num_layers * 8 * geometry.num_kv_heads * geometry.head_dim * 4
    flags = {"block_size": 8, "kv_memory": 26 * block, "max_model_len": 200, "prefix_caching": False}
    flags["preemption"] = preemption
    prompts = [ONE, TWICE, TEXT, ONE]
    with engine_cell(checkpoint, **flags) as cell:
        assert_matches(cell, prompts, cell.answer(prompts, 24))
        assert cell.metric("vllm:num_preemptions_total") > 0
        cell.assert_at_rest()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_paused_requests_answer_alike_once_they_are_resumed(checkpoint: Checkpoint, preemption: str) -> None:
    prompts = [ONE, TEXT]
    results = [reference(checkpoint.path, prompt, 24) for prompt in prompts]
    with engine_cell(checkpoint, max_num_seqs=1, prefix_caching=False, preemption=preemption) as cell:
        paused, other = (
            cell.request(prompt, result.prompt_token_ids, 24)
            for prompt, result in zip(prompts, results, strict=True)
        )
        cell.engine.submit(paused)
        cell.wait(paused.request_id, "tokens")
        cell.engine.pause([paused.request_id], [], "proxy")
        assert cell.finish([other]) == [results[1].token_ids]
        assert len(cell.tokens(paused.request_id)) < 24
        cell.engine.pause([], [paused.request_id], "proxy")
        cell.wait(paused.request_id, "finished")
        assert cell.tokens(paused.request_id) == results[0].token_ids
        cell.assert_at_rest()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
@pytest.mark.parametrize("budget", [7, 16, 33, 512, 4096])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_match_with_every_budget_and_block_size(family, budget, block_size, prefix_caching):
    flags = {"max_num_batched_tokens": budget, "block_size": block_size, "prefix_caching": prefix_caching}
    with engine_cell(Checkpoint.open(family), **flags) as cell:
        for _ in range(2):
            assert_matches(cell, MIXED, cell.answer(MIXED, 64))
        cell.assert_at_rest()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_chunk_boundary_at_every_offset_of_three_images_changes_nothing(family: str) -> None:
    checkpoint = Checkpoint.open(family)
    ids = reference(checkpoint.path, THREE, 24).prompt_token_ids
    end = checkpoint.features(ids, THREE)[-1].placement.end
    for budget in range(2, end + 1, 1 if end < 120 else 3):
        with engine_cell(checkpoint, max_num_batched_tokens=budget, prefix_caching=False) as cell:
            assert_matches(cell, [THREE], cell.answer([THREE], 24))


def test_mutant_zeroed_deepstack_changes_the_output(checkpoint: Checkpoint) -> None:
    width = checkpoint.decoder.geometry.hidden_size
    with engine_cell(checkpoint) as cell:
        request = cell.request(ONE, reference(checkpoint.path, ONE, 24).prompt_token_ids, 24)
        output = cell.store[request.features[0].mm_hash]
        data = output.data.clone()
        data[:, width:] = 0
        cell.store[request.features[0].mm_hash] = EncoderOutput(output.plan, data)
        assert differs(cell, [ONE], cell.finish([request]))


OVERLAP_TOKENS, BLOCK = 24, 4
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
    token_ids = reference(cell.checkpoint.path, prompt, OVERLAP_TOKENS).prompt_token_ids
    request = cell.request(prompt, token_ids, OVERLAP_TOKENS, publish=False)
    cell.engine.submit(request)
    cell.wait(request.request_id, "admitted")
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
    done = cell.wait(request.request_id, "finished")
    assert done.error is None and done.cached_tokens == cached
    expected = reference(cell.checkpoint.path, prompt, OVERLAP_TOKENS)
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
        assert cell.wait(request.request_id, "item_missing").mm_hash == request.features[1].mm_hash
        comes(cell, request, 1)
        prefilled_before(cell, request, 2)
        comes(cell, request, 2)
        exact(cell, request, THREE)


PROMPT = Prompt("Compare these two.", ((1, 96, 64), (3, 64, 64)))
MANY_TOKENS = 24
#: Tokens of a step: prompts are prefilled in chunks that cut the pictures.
BUDGET = 29


class _Teacher:
    """Keeps the logits of every step, and makes the sampler take the reference's token."""

    def __init__(self, checkpoint: Checkpoint, token_ids: list[int]) -> None:
        self._logits = checkpoint.decoder.logits
        self._token_ids = token_ids
        self.seen: list[torch.Tensor] = []

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._logits(hidden)
        assert logits.dtype == torch.bfloat16
        (row,) = logits
        forced = torch.full_like(logits, -1.0)
        forced[0, self._token_ids[len(self.seen)]] = 1.0
        self.seen.append(row.float())
        return forced


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_the_largest_logit_error_is_at_most_twice_that_of_transformers(family, monkeypatch):
    checkpoint = Checkpoint.open(family, dtype=torch.bfloat16)
    result = reference(checkpoint.path, PROMPT, MANY_TOKENS)
    teacher = _Teacher(checkpoint, result.token_ids)
    monkeypatch.setattr(checkpoint.decoder, "logits", teacher)
    with engine_cell(checkpoint, max_num_batched_tokens=BUDGET) as cell:
        assert cell.answer([PROMPT], MANY_TOKENS) == [result.token_ids]
        assert cell.metric("triptych_pd_chunked_prefills_total") > 0
    given = (checkpoint.path, PROMPT.messages, PROMPT.images, result.token_ids[:-1])
    exact = teacher_forced_logits(*given)
    theirs = teacher_forced_logits(*given, dtype=torch.bfloat16).float()
    ours = torch.stack(teacher.seen)
    assert ours.shape == exact.shape == theirs.shape
    assert 0 < (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()


@pytest.mark.parametrize("kernels", ["triptych then onednn", "onednn then triptych"])
def test_the_error_stays_within_its_bound_where_a_resume_finds_other_products(
    kernels: str, prepack_all: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where two machines chose otherwise, and a request goes from one to the other."""
    checkpoint = Checkpoint.open("qwen3_vl", dtype=torch.bfloat16)
    result = reference(checkpoint.path, PROMPT, MANY_TOKENS)
    teacher = _Teacher(checkpoint, result.token_ids)
    monkeypatch.setattr(checkpoint.decoder, "logits", teacher)
    layers = [part for part in checkpoint.decoder.module.modules() if isinstance(part, PrepackedLinear)]
    for at, kernel in enumerate(kernels.split(" then ")):
        before = result.token_ids[: at * MANY_TOKENS // 2]
        choose_products(checkpoint.decoder.module, kernel)
        assert {bool(part.chosen) for part in layers if part.block} <= {kernel == "triptych"}
        with engine_cell(checkpoint, max_num_batched_tokens=BUDGET) as cell:
            request = cell.request(PROMPT, [*result.prompt_token_ids, *before], MANY_TOKENS // 2)
            assert cell.finish([request]) == [result.token_ids[len(before) : len(before) + MANY_TOKENS // 2]]
    given = (checkpoint.path, PROMPT.messages, PROMPT.images, result.token_ids[:-1])
    exact = teacher_forced_logits(*given)
    theirs = teacher_forced_logits(*given, dtype=torch.bfloat16).float()
    ours = torch.stack(teacher.seen)
    assert ours.shape == exact.shape
    assert 0 < (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()

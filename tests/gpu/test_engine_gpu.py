"""The engine on a CUDA device against transformers' fp32 reference."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForImageTextToText

from support.data.oracle import _prepare, assert_exact, teacher_forced_logits
from support.engine.engine_cell import Checkpoint, Prompt, engine_cell, reference
from support.engine.prompts import MIXED

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "llava"])
@pytest.mark.parametrize(
    ("budget", "backend"), [(33, "triton"), (4096, "triton"), (33, "sdpa"), (4096, "sdpa")]
)
def test_fp32_tokens_match_on_the_device(family: str, budget: int, backend: str) -> None:
    checkpoint = Checkpoint.open(family, device="cuda", dtype=torch.float32)
    flags = {"max_num_batched_tokens": budget, "block_size": 8, "attention_backend": backend}
    with engine_cell(checkpoint, **flags) as cell:
        results = [reference(checkpoint.path, prompt, 64) for prompt in MIXED]
        assert_exact(results, cell.answer(MIXED, 64), min_distinct=16)
        cell.assert_at_rest()


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "llava"])
def test_bf16_logits_are_as_near_as_those_of_transformers(family: str) -> None:
    checkpoint = Checkpoint.open(family, device="cuda", dtype=torch.bfloat16)
    prompt = MIXED[2]
    exact = teacher_forced_logits(checkpoint.path, prompt.messages, prompt.images, [])
    theirs = _transformers_bf16(checkpoint, prompt)
    ours = _engine_logits(checkpoint, prompt)
    assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()


def _engine_logits(checkpoint: Checkpoint, prompt: Prompt) -> torch.Tensor:
    """[1, vocabulary] after the prompt, in chunks of 33 tokens."""
    seen: list[torch.Tensor] = []
    logits = checkpoint.decoder.logits

    def watch(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(logits(hidden))
        return seen[-1]

    checkpoint.decoder.logits = watch  # type: ignore[method-assign]
    try:
        with engine_cell(checkpoint, max_num_batched_tokens=33) as cell:
            ids = reference(checkpoint.path, prompt, 64).prompt_token_ids
            cell.finish([cell.request(prompt, ids, 1)])
    finally:
        checkpoint.decoder.logits = logits  # type: ignore[method-assign]
    return seen[0].float().cpu()


def _transformers_bf16(checkpoint: Checkpoint, prompt: Prompt) -> torch.Tensor:
    model = AutoModelForImageTextToText.from_pretrained(checkpoint.path, dtype=torch.bfloat16).to("cuda")
    inputs = _prepare(checkpoint.path, prompt.messages, prompt.images)
    moved = {
        name: value.to("cuda", torch.bfloat16 if value.is_floating_point() else value.dtype)
        for name, value in inputs.items()
    }
    with torch.no_grad():
        return model(**moved, logits_to_keep=1).logits[0].float().cpu()

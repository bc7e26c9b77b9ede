"""The engine on a GPU, with graphs and without."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForImageTextToText

from support.data.checkpoints import build_checkpoint
from support.data.oracle import _prepare, assert_exact, teacher_forced_logits
from support.encdec.batches import ENC_DEC, answers_in_batches
from support.engine.decode_steps import DecodeSteps, Decoding
from support.engine.engine_cell import Checkpoint, Prompt, engine_cell, reference
from support.engine.prompts import MIXED
from triptych.base.machine.graphs import CudaGraph
from triptych.models.registry import load_decoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME

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


STEPS = (
    [Decoding(5, 40), Decoding(77, 1), Decoding(16, 64), Decoding(1, 17)],
    [Decoding(5, 40), Decoding(77, 1), Decoding(16, 64)],
    [Decoding(300, 64), Decoding(8, 2)],
    [Decoding(1, 3)],
)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "llava"])
def test_fp32_tokens_match_with_cuda_graphs(family: str) -> None:
    checkpoint = Checkpoint.open(family, device="cuda", dtype=torch.float32)
    flags = {"max_num_batched_tokens": 33, "block_size": 8}
    with engine_cell(checkpoint, decode_graphs="cuda", max_num_seqs=4, **flags) as cell:
        results = [reference(checkpoint.path, prompt, 64) for prompt in MIXED]
        for _ in range(2):
            assert_exact(results, cell.answer(MIXED, 64), min_distinct=16)
        assert cell.metric("triptych_pd_graph_steps_total") > 100
        cell.assert_at_rest()


@pytest.mark.parametrize("family", ENC_DEC)
def test_encoder_decoder_models_match_with_cuda_graphs(family: str) -> None:
    answers_in_batches(family, (1, 4, 8), device="cuda", decode_graphs="cuda")


@pytest.mark.parametrize("family", ["qwen3_vl", "t5"])
def test_replays_read_and_write_nothing_but_their_own_steps_blocks(family: str) -> None:
    """Captured over one token a sequence, replayed with up to 300, between NaN wherever nothing is theirs."""
    decoder = load_decoder(
        build_checkpoint(family), device=torch.device("cuda"), dtype=torch.float32,
        attn_implementation=ATTENTION_NAME,
    )  # fmt: skip
    steps = DecodeSteps(decoder, CudaGraph(decoder.device), attention="triton")
    for seed, sequences in enumerate(STEPS):
        batch = steps.batch(sequences, seed)
        expected = steps.eager(batch)
        with steps.unchanged():
            steps.poison_buffers()
            steps.poison_others(batch)
            assert torch.allclose(steps.replayed(batch), expected, rtol=1e-4, atol=1e-5)
            assert steps.others_are_poison(batch)


def test_preemption_between_replays_changes_nothing() -> None:
    checkpoint = Checkpoint.open("qwen3_vl", device="cuda", dtype=torch.float32)
    geometry = checkpoint.decoder.geometry
    block = 2 * geometry.num_layers * 8 * geometry.num_kv_heads * geometry.head_dim * 4
    flags = {"block_size": 8, "kv_memory": 26 * block, "max_model_len": 200, "prefix_caching": False}
    prompts = [MIXED[1], MIXED[3], MIXED[0], MIXED[1]]
    with engine_cell(checkpoint, decode_graphs="cuda", preemption="swap", max_num_seqs=4, **flags) as cell:
        results = [reference(checkpoint.path, prompt, 24) for prompt in prompts]
        assert_exact(results, cell.answer(prompts, 24), min_distinct=10)
        assert cell.metric("vllm:num_preemptions_total") > 0

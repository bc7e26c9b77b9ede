"""Decode graphs on a CUDA device: captured, replayed, and equal to steps without graphs."""

from __future__ import annotations

import pytest
import torch

from support.data.checkpoints import build_checkpoint
from support.data.oracle import assert_exact
from support.encdec.batches import ENC_DEC, answers_in_batches
from support.engine.decode_steps import DecodeSteps, Decoding
from support.engine.engine_cell import Checkpoint, engine_cell, reference
from support.engine.prompts import MIXED
from triptych.base.machine.graphs import CudaGraph
from triptych.models.registry import load_decoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME

pytestmark = pytest.mark.gpu

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

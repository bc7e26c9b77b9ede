"""Whole decoders with the attention kernel, by Triton's interpreter: steps as SDPA computes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.data.checkpoints import build_checkpoint
from support.data.oracle import assert_exact
from support.engine.decode_steps import DecodeSteps, Decoding
from support.engine.engine_cell import Checkpoint, Prompt, engine_cell, reference
from triptych.base.machine.device import Device
from triptych.base.machine.graphs import EagerStatic
from triptych.models.registry import load_decoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.runner import capacity

STEPS = ([Decoding(5, 40), Decoding(77, 1), Decoding(16, 64)], [Decoding(300, 64), Decoding(1, 2)])


@pytest.mark.parametrize("family", ["llava", "t5"])
def test_replays_read_nothing_but_their_own_steps_blocks_up_to_its_length(family, monkeypatch):
    """Buffers of one size hold steps of any length; what is beyond a sequence's length may be NaN."""
    monkeypatch.setattr(Device, "processors", 24)
    decoder = load_decoder(
        build_checkpoint(family), device=torch.device("cpu"), dtype=torch.float32,
        attn_implementation=ATTENTION_NAME,
    )  # fmt: skip
    steps = DecodeSteps(decoder, EagerStatic(), attention="triton")
    for seed, sequences in enumerate(STEPS):
        batch = steps.batch(sequences, seed)
        expected = steps.eager(replace(batch, attention=replace(batch.attention, backend="sdpa")))
        with steps.unchanged():
            steps.poison_buffers()
            steps.poison_others(batch)
            assert torch.allclose(steps.replayed(batch), expected, rtol=1e-4, atol=1e-5)
            assert steps.others_are_poison(batch)


def test_answers_are_those_of_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of prompts, and decodes beside them."""
    monkeypatch.setattr(capacity, "backend_on", lambda device, name: "triton")
    checkpoint = Checkpoint.open("qwen3_vl")
    prompts = [Prompt("What is this?", ((1, 96, 64),)), Prompt("Say something about the sea.")]
    results = [reference(checkpoint.path, prompt, 8) for prompt in prompts]
    with engine_cell(checkpoint, max_num_batched_tokens=33, block_size=8) as cell:
        assert_exact(results, cell.answer(prompts, 8), min_distinct=2)

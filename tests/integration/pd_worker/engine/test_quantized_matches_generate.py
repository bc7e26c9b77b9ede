"""Tokens of a quantized checkpoint are those that `generate` gives with its library's own floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.data.checkpoints import build_checkpoint
from support.data.oracle import assert_exact
from support.data.quantized import compressed, fp8, write_quantized
from support.engine.engine_cell import Checkpoint, engine_cell, reference
from support.engine.prompts import MIXED
from triptych.models.registry import load_decoder, load_encoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME

FORMATS = {
    "fp8-block": fp8((16, 16)),
    "ct-int8-channel": compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "ct-fp8-channel": compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
}


@pytest.mark.parametrize(
    ("family", "form"),
    [("qwen3_vl", "fp8-block"), ("qwen2_5_vl", "ct-int8-channel"), ("llava", "ct-fp8-channel")],
)
def test_mixed_prompts_match_over_24_tokens(family: str, form: str, tmp_path: Path) -> None:
    def chosen(key: str) -> bool:
        return "language_model.layers" in key

    source = build_checkpoint(family, variant="sharded")
    quantized, plain = write_quantized(source, tmp_path, FORMATS[form], chosen)
    options: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
    decoder = load_decoder(quantized, **options, attn_implementation=ATTENTION_NAME)
    # By the path of its floats, with which prompts are asked.
    checkpoint = Checkpoint(plain, load_encoder(quantized, **options), decoder)
    with engine_cell(checkpoint, max_num_batched_tokens=33, block_size=8) as cell:
        outputs = cell.answer(MIXED, 24)
        assert_exact([reference(plain, prompt, 24) for prompt in MIXED], outputs, min_distinct=5)
        # The rounding is in the answers: they are not those of the weights that were quantized.
        assert outputs != [reference(source, prompt, 24).token_ids for prompt in MIXED]

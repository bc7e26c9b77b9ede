"""Sizes of pictures as the simulator counts them, against the checkpoints' own image processors."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from support.data.checkpoints import FAMILIES, build_checkpoint
from triptych.models.registry import load_decoder, load_encoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.frontend.prompt import open_checkpoint
from triptych.simulator.costs.costs import QWEN3_VL_4B_SHAPE, ModelShape
from triptych.simulator.profile.profile import shape_of

#: Ordinary, tiny, narrow, and above the largest that these checkpoints take.
SIZES = [(64, 64), (8, 8), (100, 60), (33, 47), (200, 200), (640, 480), (1024, 1024), (12, 300), (5, 400)]


def loaded(family: str) -> tuple[ModelShape, object]:
    path = build_checkpoint(family)
    encoder = load_encoder(path, device=torch.device("cpu"), dtype=torch.float32)
    decoder = load_decoder(
        path, device=torch.device("cpu"), dtype=torch.float32, attn_implementation=ATTENTION_NAME
    )
    prompts, _ = open_checkpoint(path, decoder, 4096)
    return shape_of(path, encoder, decoder, prompts), encoder


@pytest.mark.parametrize("family", FAMILIES)
def test_patches_and_rows_are_those_of_the_checkpoints_processor(family: str) -> None:
    shape, encoder = loaded(family)
    for width, height in SIZES:
        item = encoder.preprocess(Image.new("RGB", (width, height), "grey"), {})  # type: ignore[attr-defined]
        assert shape.plan(width, height) == (item.cost, item.rows), f"{width}x{height}"


def test_a_checkpoints_sizes_in_bytes_and_tokens() -> None:
    shape, _ = loaded("qwen3_vl")
    # 64 wide with two deepstack levels; keys and values of 3 layers, 2 heads of 16; all in float32.
    assert (shape.row_bytes, shape.kv_token_bytes) == (64 * 3 * 4, 2 * 3 * 2 * 16 * 4)
    assert shape.prompt_overhead_tokens > 0
    assert shape.item_overhead_tokens == 2, "vision start and vision end"


def test_a_picture_of_640_by_640_has_400_rows_in_qwen3_vl_4b() -> None:
    assert QWEN3_VL_4B_SHAPE.plan(640, 640) == (1600, 400)
    assert QWEN3_VL_4B_SHAPE.row_bytes == 2560 * 4 * 2
    assert QWEN3_VL_4B_SHAPE.kv_token_bytes == 147456

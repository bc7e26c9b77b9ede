"""Sizes of pictures as the simulator counts them, against the checkpoints' own image processors."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from support.data.checkpoints import FAMILIES, build_checkpoint
from triptych.models.registry import load_decoder, load_encoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.frontend.prompt import open_checkpoint
from triptych.simulator.costs.costs import ModelShape
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

"""The sizes of a checkpoint, as the simulator counts them."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import Image

from triptych.models.base import DecoderSide, EncoderSide
from triptych.models.images import ImageProcessor
from triptych.pd_worker.frontend.prompt import PromptBuilder
from triptych.simulator.costs.costs import ModelShape

_PROBE = (64, 64)


def shape_of(path: Path, encoder: EncoderSide, decoder: DecoderSide, prompts: PromptBuilder) -> ModelShape:
    """Sizes of the checkpoint in `path`, whose two sides and prompts are given."""
    geometry = decoder.geometry
    text, picture = _tokens(prompts, []), _tokens(prompts, [{"type": "image"}])
    values = {
        "row_bytes": encoder.width * encoder.dtype.itemsize,
        "kv_token_bytes": 2
        * geometry.num_layers
        * geometry.num_kv_heads
        * geometry.head_dim
        * decoder.dtype.itemsize,
        "prompt_overhead_tokens": text - 1,
        # The image's own token makes room for the placeholder.
        "item_overhead_tokens": max(0, picture - text - 1),
    }
    images = ImageProcessor(path)
    item = encoder.preprocess(Image.new("RGB", _PROBE, "grey"), {})
    if not item.grid_thw:
        height, width = item.tensors["pixel_values"].shape[-2:]
        patch = round((height * width / item.cost) ** 0.5)
        pixels = int(height * width)
        return ModelShape(patch, 1, pixels, pixels, fixed_rows=item.rows, **values)
    size = dict(images.get("size"))
    return ModelShape(
        patch=int(images.get("patch_size")),
        merge=int(images.get("merge_size")),
        min_pixels=int(size["shortest_edge"]),
        max_pixels=int(size["longest_edge"]),
        **values,
    )


def _tokens(prompts: PromptBuilder, parts: list[dict[str, str]]) -> int:
    """Of a conversation with these parts and a text of one token."""
    content = [*parts, {"type": "text", "text": "x"}]
    return len(prompts.tokenize(json.dumps([{"role": "user", "content": content}]).encode()))

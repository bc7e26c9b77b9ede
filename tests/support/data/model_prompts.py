"""A prompt with images as the two sides of a family see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from triptych.base.types import ItemPlan, MMFeature, Placement
from triptych.models.base import DecoderSide, EncoderSide, MergedEmbeds, PreparedItem


@dataclass(frozen=True)
class ModelPrompt:
    """Token ids with placeholders, where the images stand, and the rows that belong there."""

    token_ids: list[int]
    features: list[MMFeature]
    rows: list[torch.Tensor]


def question(images: int, text: str = "What is in these pictures?") -> list[dict[str, Any]]:
    """One user message with `images` image parts before the text."""
    return [{"role": "user", "content": [*[{"type": "image"}] * images, {"type": "text", "text": text}]}]


def plan_of(item: PreparedItem, width: int, mm_hash: str = "0" * 64) -> ItemPlan:
    return ItemPlan(mm_hash, "n", "image", item.rows, width, "float32", item.length, item.runs, item.grid_thw)


def model_prompt(
    encoder: EncoderSide, decoder: DecoderSide, token_ids: Sequence[int], images: Sequence[Image.Image]
) -> ModelPrompt:
    """`token_ids` already hold the placeholders; images meet them in order."""
    items = [encoder.preprocess(image, {}) for image in images]
    features, offset = [], 0
    assert decoder.image_token_id is not None
    for item in items:
        offset = list(token_ids).index(decoder.image_token_id, offset)
        plan = plan_of(item, encoder.width)
        placeholder = decoder.placeholder(plan)
        assert list(token_ids[offset : offset + len(placeholder)]) == placeholder
        features.append(MMFeature(plan, Placement(offset, item.length)))
        offset += item.length
    return ModelPrompt(list(token_ids), features, encoder.encode(items) if items else [])


def batch_logits(
    decoder: DecoderSide, prompts: Sequence[ModelPrompt], *, shuffle: bool = False
) -> torch.Tensor:
    """Logits of every token of a flattened batch of whole prompts, by the reference attention."""
    embeds, positions, index, rows, start = [], [], [], [], 0
    for prompt in prompts:
        embeds.append(decoder.embed(torch.tensor(prompt.token_ids)))
        positions.append(decoder.positions(prompt.token_ids, prompt.features)[0])
        for feature, part in zip(prompt.features, prompt.rows, strict=True):
            index.append(torch.arange(feature.placement.offset, feature.placement.end) + start)
            rows.append(part)
        start += len(prompt.token_ids)
    merged = MergedEmbeds(torch.cat(index), torch.cat(rows)) if rows else None
    if merged is not None and shuffle:
        order = torch.randperm(len(merged.index), generator=torch.Generator().manual_seed(0))
        merged = MergedEmbeds(merged.index[order], merged.rows[order])
    lengths = [len(prompt.token_ids) for prompt in prompts]
    return decoder.logits(decoder.forward(torch.cat(embeds), torch.cat(positions, dim=1), merged, lengths))

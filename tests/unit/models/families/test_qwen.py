"""Qwen's positions of multimodal prompts and its patch embedding, against transformers' own."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from support.data.checkpoints import build_checkpoint
from triptych.base.types import ItemPlan, MMFeature, Placement
from triptych.models.families.qwen import mrope_positions

MERGE = 2


def feature(offset: int, rows: int, columns: int) -> MMFeature:
    count = rows * columns
    grid = (1, rows * MERGE, columns * MERGE)
    plan = ItemPlan("0" * 64, "n", "image", count, 8, "float32", count, None, grid)
    return MMFeature(plan, Placement(offset, count))


def layout(rng: random.Random) -> tuple[int, list[MMFeature]]:
    """A prompt's length and its images: text first, between and after, as every template puts it."""
    index, features = rng.randrange(0, 20), []
    for _ in range(rng.randrange(0, 5)):
        features.append(feature(index, rng.randrange(1, 9), rng.randrange(1, 9)))
        index = features[-1].placement.end + rng.randrange(1, 20)
    return max(index, 1), features


def reference(model: torch.nn.Module, length: int, features: list[MMFeature]) -> tuple[torch.Tensor, int]:
    types = torch.zeros(1, length, dtype=torch.int)
    for each in features:
        types[0, each.placement.offset : each.placement.end] = 1
    grids = torch.tensor([each.plan.grid_thw for each in features]) if features else None
    ids = torch.zeros(1, length, dtype=torch.long)
    positions, delta = model.get_rope_index(ids, types, image_grid_thw=grids)
    return positions[:, 0], int(delta)


@pytest.mark.parametrize(
    ("family", "model_class"), [("qwen3_vl", Qwen3VLModel), ("qwen2_5_vl", Qwen2_5_VLModel)]
)
def test_positions_equal_transformers_for_any_layout_of_images(family, model_class):
    config = AutoConfig.from_pretrained(build_checkpoint(family))
    with torch.device("meta"):
        model = model_class(config)
    rng = random.Random(7)
    for _ in range(60):
        length, features = layout(rng)
        expected, expected_delta = reference(model, length, features)
        positions, delta = mrope_positions(length, features, MERGE)
        assert torch.equal(positions, expected)
        assert delta == expected_delta


def test_a_text_prompt_counts_in_every_row() -> None:
    positions, delta = mrope_positions(5, [], MERGE)
    assert positions.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert delta == 0


def test_features_may_come_in_any_order() -> None:
    features = [feature(1, 2, 2), feature(6, 1, 3)]
    forward, _ = mrope_positions(12, features, MERGE)
    backward, _ = mrope_positions(12, features[::-1], MERGE)
    assert torch.equal(forward, backward)

"""Placeholders, positions and sizes of the decoder sides."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from support.data.checkpoints import FAMILIES, build_checkpoint
from support.engine.reference_attention import NAME
from triptych.base.errors import InvalidRequest
from triptych.base.types import ItemPlan
from triptych.models.base import DecoderSide
from triptych.models.registry import load_decoder

PLAN = ItemPlan("0" * 64, "n", "image", 6, 64, "float32", 6, None, (1, 4, 6))


@functools.cache
def decoder(family: str) -> DecoderSide:
    path = build_checkpoint(family)
    return load_decoder(path, device=torch.device("cpu"), dtype=torch.float32, attn_implementation=NAME)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_a_placeholder_is_the_image_token_once_per_row(family: str) -> None:
    side = decoder(family)
    token = AutoTokenizer.from_pretrained(build_checkpoint(family)).convert_tokens_to_ids("<|image_pad|>")
    assert side.placeholder(PLAN) == [token] * 6


@pytest.mark.parametrize(
    "plan",
    [
        replace(PLAN, rows=7, length=7),
        replace(PLAN, length=5),
        replace(PLAN, grid_thw=(1, 3, 6)),
        replace(PLAN, grid_thw=(0, 4, 6)),
        replace(PLAN, grid_thw=()),
    ],
)
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_a_plan_that_does_not_fit_its_grid_is_refused(family: str, plan: ItemPlan) -> None:
    with pytest.raises(InvalidRequest) as refused:
        decoder(family).placeholder(plan)
    assert refused.value.param == "plan"


@pytest.mark.parametrize("length", [0, 5, 7])
def test_llava_refuses_a_plan_whose_length_is_not_its_rows(length: int) -> None:
    with pytest.raises(InvalidRequest):
        decoder("llava").placeholder(replace(PLAN, length=length, grid_thw=()))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_geometry_is_the_configs(family: str) -> None:
    side, text = decoder(family), AutoConfig.from_pretrained(build_checkpoint(family)).text_config
    geometry = side.geometry
    assert (geometry.num_layers, geometry.num_heads, geometry.num_kv_heads) == (3, 4, 2)
    assert (geometry.hidden_size, geometry.head_dim, geometry.vocab_size) == (64, 16, text.vocab_size)
    assert geometry.max_position_embeddings == text.max_position_embeddings
    assert geometry.deepstack_levels == (2 if family == "qwen3_vl" else 0)

"""An override gives the rows that the adapter for any class gives, and its plans are read alike."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from support.data.checkpoints import FAMILIES, build_checkpoint
from support.data.model_prompts import ModelPrompt, batch_logits, model_prompt
from support.data.pictures import picture
from support.engine.reference_attention import NAME
from triptych.base.types import MMFeature
from triptych.models.base import EncoderSide, PreparedItem
from triptych.models.fused.layers import FusedDecoderLayer
from triptych.models.generic import DECODER, ENCODER
from triptych.models.generic.layout import ItemLayout
from triptych.models.images import ImageProcessor
from triptych.models.registry import load_decoder, load_encoder

CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
EVERY = pytest.mark.parametrize("family", FAMILIES)
PICTURES = [picture(1, 64, 64), picture(2, 96, 48), picture(3, 40, 90)]


@dataclass(frozen=True)
class Sides:
    """Both sides of one checkpoint."""

    encoder: EncoderSide
    decoder: Any


@functools.cache
def override(family: str) -> Sides:
    """As a worker loads it: with fused layers and packed weights."""
    path = build_checkpoint(family)
    return Sides(load_encoder(path, **CPU), load_decoder(path, **CPU, attn_implementation=NAME))


@functools.cache
def adapter(family: str) -> Sides:
    path = build_checkpoint(family)
    encoder = ENCODER.without_processor(path, **CPU)
    return Sides(encoder, DECODER.load(path, **CPU, attn_implementation=NAME))


def prepared(path: Path, item: PreparedItem, number: int) -> PreparedItem:
    """The item with the tensors that its class takes, by the checkpoint's own processor."""
    inputs = ImageProcessor(path)(PICTURES[number], {})
    return replace(item, tensors={name: x for name, x in inputs.items() if torch.is_tensor(x)})


def for_adapter(feature: MMFeature, decoder: Any) -> MMFeature:
    """The feature with the layout that the adapter's encoder would send in place of a grid."""
    plan, width = feature.plan, len(decoder.capture.type_names)
    grids = {0: torch.tensor([plan.grid_thw])} if plan.grid_thw else {}
    layout = ItemLayout((decoder.image_token_id,) * plan.rows, ((1,) * width,) * plan.rows, grids)
    return replace(feature, plan=replace(plan, layout=layout.encode()))


def prompt(family: str) -> ModelPrompt:
    """Text, a picture, text, two pictures, text; the rows are the override's."""
    sides = override(family)
    image = sides.decoder.image_token_id
    counts = [sides.encoder.preprocess(each, {}).rows for each in PICTURES]
    ids = [5, 6, *[image] * counts[0], 7, *[image] * counts[1], 8, *[image] * counts[2], 9, 10, 11]
    return model_prompt(sides.encoder, sides.decoder, ids, PICTURES)


@EVERY
def test_a_batch_of_pictures_has_the_rows_of_the_adapter(family: str) -> None:
    path, sides = build_checkpoint(family), override(family)
    items = [sides.encoder.preprocess(each, {}) for each in PICTURES]
    theirs = adapter(family).encoder.encode([prepared(path, item, n) for n, item in enumerate(items)])
    assert sides.encoder.width == adapter(family).encoder.width
    for ours, rows in zip(sides.encoder.encode(items), theirs, strict=True):
        torch.testing.assert_close(ours, rows, atol=2e-5, rtol=0)


@EVERY
def test_a_plan_without_a_layout_is_as_one_with_the_layout_of_the_adapters_encoder(family: str) -> None:
    decoder, asked = override(family).decoder, prompt(family)
    features = [for_adapter(feature, decoder) for feature in asked.features]
    given = decoder.prompt_inputs(asked.token_ids, asked.features)
    described = decoder.prompt_inputs(asked.token_ids, features)
    assert torch.equal(given.positions, described.positions)
    assert (given.delta, given.spans, given.inputs) == (described.delta, described.spans, described.inputs)
    for own, other in zip(asked.features, features, strict=True):
        assert decoder.placeholder(own.plan) == decoder.placeholder(other.plan)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_only_a_text_with_a_token_that_the_config_names_goes_through_the_classs_forward(family: str) -> None:
    decoder = override(family).decoder
    with mock.patch.object(decoder.capture, "run", wraps=decoder.capture.run) as run:
        decoder.prompt_inputs([5, 6, 7], ())
        assert not run.called
        decoder.prompt_inputs([5, decoder.image_token_id, 7], ())
        assert run.called


@EVERY
def test_fused_layers_give_the_logits_and_tokens_of_transformers_own(family: str) -> None:
    ours, theirs, asked = override(family).decoder, adapter(family).decoder, prompt(family)
    assert any(isinstance(layer, FusedDecoderLayer) for layer in ours.module.modules())
    fused, plain = batch_logits(ours, [asked]), batch_logits(theirs, [asked])
    torch.testing.assert_close(fused, plain, atol=1e-4, rtol=0)
    assert torch.equal(fused.argmax(-1), plain.argmax(-1))

"""`mm_processor_kwargs` under the adapter: prompt and tokens as by the processor called with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.data.pictures import picture
from support.engine.engine_cell import engine_cell
from support.zoo.cases import assert_exact
from support.zoo.checkpoint import checkpoint
from support.zoo.engine import Served
from support.zoo.own_processor import ask, reference
from triptych.base.config import MIB
from triptych.base.errors import InvalidRequest
from triptych.models.base import EncoderSide
from triptych.models.generic import ENCODER

pytestmark = [
    pytest.mark.timeout(180),
    # By transformers, of its PIL processors.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

_CPU = {"device": torch.device("cpu"), "dtype": torch.float32}
#: Per family: settings of each kind that change its picture.
OPTIONS: dict[str, dict[str, Any]] = {
    "Qwen3_5": {"max_pixels": 512},
    "Glm4v": {"size": {"shortest_edge": 256, "longest_edge": 512}},
    "VideoLlama3": {"min_pixels": 64, "max_pixels": 400},
    "InternVL": {"max_patches": 1},
    "AyaVision": {"crop_to_patches": False},
    "Idefics3": {"do_image_splitting": False},
    "LightOnOcr": {"size": {"longest_edge": 16}},
    "Gemma3": {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8, "pan_and_scan_max_num_crops": 2},
    "Llava": {"do_normalize": False},
}
#: Per family: what is refused, and what the answer names.
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("Glm4v", {"colour": "red"}, "colour", "size"),
    ("Glm4v", {"max_pixels": 512}, "max_pixels", "this model knows"),
    ("Glm4v", {"patch_size": 2}, "patch_size", "this model knows"),
    ("Glm4v", {"size": {"shortest_edge": 256, "longest_edge": 4096}}, "size", "limit of 1024"),
    ("Glm4v", {"size": {"shortest_edge": 4096, "longest_edge": 1024}}, "size", "limit of 1024"),
    ("Glm4v", {"size": {"height": 64}}, "size", "invalid value"),
    ("Glm4v", {"size": {}}, "size", "invalid value"),
    ("Glm4v", {"size": [16]}, "size", "invalid value"),
    ("Qwen3_5", {"min_pixels": 1 << 40}, "min_pixels", "limit of 1024"),
    ("Qwen3_5", {"max_pixels": True}, "max_pixels", "invalid value"),
    ("Qwen3_5", {"max_pixels": 512.5}, "max_pixels", "invalid value"),
    ("Qwen3_5", {"max_pixels": 0}, "max_pixels", "invalid value"),
    ("Qwen3_5", {"do_resize": False}, "do_resize", "this model knows"),
    ("Qwen3_5", {"do_normalize": 1}, "do_normalize", "invalid value"),
    ("InternVL", {"max_patches": 1000}, "max_patches", "limit of 4"),
    ("InternVL", {"size": {"height": 8, "width": 8}}, "", "another size than this model takes"),
    ("Gemma3", {"pan_and_scan_max_num_crops": 100}, "pan_and_scan_max_num_crops", "limit of 4"),
]


@pytest.mark.parametrize("family", OPTIONS)
def test_a_picture_is_answered_as_by_the_processor_called_with_the_same_settings(family: str) -> None:
    name, options = f"{family}ForConditionalGeneration", OPTIONS[family]
    served, images = Served.open(name), [picture(3, 44, 28)]
    encoder = ENCODER.load(served.path, **_CPU)
    plain, plain_rows = ask(name, encoder, served.decoder, images)
    with engine_cell(served, max_num_batched_tokens=1024, max_model_len=1024, kv_memory=64 * MIB) as cell:
        token_ids, expected = reference(name, images, 16, options)
        prompt, rows = ask(name, encoder, served.decoder, images, options)
        assert list(prompt.token_ids) == token_ids
        (answer,) = cell.finish([served.built(cell, prompt, rows, 16)])
        assert_exact(expected, answer, family)
    same = prompt.token_ids == plain.token_ids and all(map(torch.equal, rows, plain_rows))
    assert not same, "the settings change nothing"


@pytest.fixture(scope="module")
def encoders() -> dict[str, EncoderSide]:
    return {}


@pytest.mark.parametrize(("family", "options", "name", "says"), REFUSED)
def test_a_setting_that_is_unknown_or_beyond_the_models_own_is_refused_by_name(
    encoders: dict[str, EncoderSide], family: str, options: dict[str, Any], name: str, says: str
) -> None:
    if family not in encoders:
        encoders[family] = ENCODER.load(checkpoint(f"{family}ForConditionalGeneration"), **_CPU)
    with pytest.raises(InvalidRequest, match=says) as refused:
        encoders[family].preprocess(picture(3, 44, 28), options)
    assert refused.value.param == f"mm_processor_kwargs.{name}".rstrip(".")

"""Processors of checkpoints, and their options."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from support.data.pictures import picture
from support.encoder_graphs.adapters import Adapter
from support.encoder_graphs.replays import assert_rows, replays
from support.engine.engine_cell import engine_cell
from support.zoo.cases import assert_exact
from support.zoo.checkpoint import checkpoint
from support.zoo.engine import Served
from support.zoo.own_processor import ask, pictures, reference
from support.zoo.status import OWN_PROCESSOR, OWN_PROCESSOR_REFUSED, RECIPES
from triptych.base.config import MIB
from triptych.base.errors import ConfigError, InvalidRequest
from triptych.models.base import EncoderSide
from triptych.models.encoder_graph import SupportsEncoderCudaGraph
from triptych.models.generic import ENCODER

pytestmark = [
    pytest.mark.timeout(300),
    # By transformers, of its PIL processors.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
#: Architectures that have to be exact from the picture on.
MINIMUM = 30
FIXED_SIZE = [f"{name}ForConditionalGeneration" for name in ("Llava", "VipLlava", "DeepseekVL", "Janus")]
_CPU = {"device": torch.device("cpu"), "dtype": torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_PROCESSOR)
def test_a_picture_is_prepared_placed_and_answered_as_by_transformers(name: str) -> None:
    served = Served.open(name)
    encoder = ENCODER.load(served.path, **_CPU)
    limits = {"max_num_batched_tokens": 1024, "max_model_len": 1024, "kv_memory": 64 * MIB}
    with engine_cell(served, **limits) as cell:
        for count in (1,) if served.recipe.one_item else (1, 2):
            token_ids, expected = reference(name, pictures(count), 16)
            prompt, rows = ask(name, encoder, served.decoder, pictures(count))
            assert list(prompt.token_ids) == token_ids
            (answer,) = cell.finish([served.built(cell, prompt, rows, 16)])
            assert_exact(expected, answer, f"{count} pictures")


@pytest.mark.parametrize("name", OWN_PROCESSOR_REFUSED)
def test_a_processor_that_cannot_be_taken_picture_by_picture_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="processor"):
        ENCODER.load(Served.open(name).path, **_CPU)


def test_a_processor_that_numbers_the_pictures_of_a_prompt_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """The number is text between special tokens: the first picture alone has the same as any."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("MiniCPMV4_6ForConditionalGeneration"), folder)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | {"use_image_id": True}))
    with pytest.raises(ConfigError, match="rewrites the prompt around pictures: set use_image_id to false"):
        ENCODER.load(folder, **_CPU)


@pytest.mark.parametrize("name", FIXED_SIZE)
def test_a_class_of_one_picture_size_has_encoder_graphs_with_the_rows_of_plain_calls(name: str) -> None:
    encoder = ENCODER.load(checkpoint(name), **_CPU)
    adapter = Adapter(name, lambda **_: encoder, lambda number: picture(number, 40 + 8 * number, 30))
    captured = replays(adapter, 3, poisoned=True)
    for budget, count in zip(sorted(captured.graphs), (1, 2, 3), strict=True):
        items = captured.items[:count]
        assert_rows(captured.at(budget, items), captured.eager(items))


def test_a_picture_that_options_cut_into_several_is_encoded_in_a_graph_too() -> None:
    encoder = ENCODER.load(checkpoint("Gemma3ForConditionalGeneration"), **_CPU)
    options = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8, "pan_and_scan_max_num_crops": 2}

    def medium(number: int) -> Image.Image:
        return picture(number, 96, 24)

    captured = replays(Adapter("Gemma3", lambda **_: encoder, medium), 4, poisoned=True)
    items = [encoder.preprocess(medium(0), options), captured.items[1]]
    assert len(items[0].tensors["pixel_values"]) > 1
    assert_rows(captured.at(max(captured.graphs), items), captured.eager(items))


@pytest.mark.parametrize("name", ["LlavaNextForConditionalGeneration", "Qwen2VLForConditionalGeneration"])
def test_a_class_of_several_picture_sizes_has_none(name: str) -> None:
    assert not isinstance(ENCODER.load(checkpoint(name), **_CPU), SupportsEncoderCudaGraph)


@pytest.mark.parametrize("family", ["Llava", "VipLlava"])
def test_a_line_of_pixels_that_a_processor_would_blow_up_is_refused(family: str) -> None:
    encoder = ENCODER.load(checkpoint(f"{family}ForConditionalGeneration"), **_CPU)
    with pytest.raises(InvalidRequest, match="smaller aspect ratio") as refused:
        encoder.preprocess(Image.new("RGB", (1_000_000, 1)), {})
    assert refused.value.param == "image"


def test_enough_architectures_have_their_own_processor() -> None:
    assert len({RECIPES[name].architecture for name in OWN_PROCESSOR}) >= MINIMUM


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

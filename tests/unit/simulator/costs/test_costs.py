"""Costs as files, sizes of models by their configs, rooflines against figures computed by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from support.data.checkpoints import FAMILIES, build_checkpoint
from triptych.base.errors import ConfigError
from triptych.models.registry import load_decoder, load_encoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.frontend.prompt import open_checkpoint
from triptych_bench.simulator.costs.costs import (
    QWEN3_VL_4B,
    QWEN3_VL_4B_SHAPE,
    CostModel,
    EncoderCosts,
    ModelShape,
    PDCosts,
    ProxyCosts,
    read_profile,
)
from triptych_bench.simulator.costs.model_config import PlannedModel, read_model
from triptych_bench.simulator.profile.profile import shape_of

COSTS = CostModel(
    "toy",
    "made up",
    EncoderCosts(1.0, 0.5, 10.0, 2.0, 0.25, 3.0, 0.125, 0.0625),
    PDCosts(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0),
    ProxyCosts(1.0, 2.0, 4.0, 8.0, 16.0),
    0.5,
)


def test_a_profile_holds_costs_and_the_models_sizes(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    document = {"format": "triptych-profile/1", **asdict(COSTS), "shape": asdict(QWEN3_VL_4B_SHAPE)}
    path.write_text(json.dumps(document))
    assert read_profile(path, "--gpu") == (COSTS, QWEN3_VL_4B_SHAPE)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "holds no profile"),
        ("[1]", "holds no profile"),
        ('{"name": "x"}', "missing required field"),
        ('{"name": 1}', "name"),
    ],
)
def test_what_is_no_profile_is_refused_with_the_way_to_get_one(tmp_path, text, said):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"costs\.json") as caught:
        read_profile(path, "--gpu")
    assert said in str(caught.value) and "triptych profile" in str(caught.value)


def test_a_tower_batch_costs_its_call_items_patches_and_pairs_within_each_item() -> None:
    # 10 + 2 x 2 + 100 / 4 + 2 x 50² / 16
    assert COSTS.encoder.tower(2, 100) == 10 + 4 + 25 + 2 * 50**2 / 16
    assert COSTS.encoder.tower(0, 0) == 0


def test_a_step_costs_all_of_its_terms() -> None:
    assert COSTS.pd.step_seconds(3, 5, 7, 11.0) == 1 + 6 + 20 + 56 + 176


#: Text of 2 layers, 64 wide, with 4 heads of 16, 2 of them for keys and values.
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 64,
    "patch_size": 14,
    "image_size": 448,
}


def read(folder: Path, text: dict[str, Any] | None = None, **config: Any) -> PlannedModel:
    """The model of a class that transformers does not know: what it reads is in the file alone."""
    told = {"model_type": "of-tomorrow", "vision_config": VISION, "text_config": TEXT | (text or {})}
    (folder / "config.json").write_text(json.dumps(told | config))
    return read_model(folder)


def test_qwen3_vl_4b_by_its_published_config_is_the_model_of_plans_without_one(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    published = {
        "model_type": "qwen3_vl",
        "text_config": {
            "head_dim": 128,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "vocab_size": 151936,
        },
        "vision_config": {
            "deepstack_visual_indexes": [5, 11, 17],
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "model_type": "qwen3_vl",
            "patch_size": 16,
            "spatial_merge_size": 2,
        },
    }
    file.write_text(json.dumps(published))
    model = read_model(file)
    assert model.geometry.stored_parameters == QWEN3_VL_4B.stored_parameters
    assert (model.name, model.geometry.vit_parameters) == ("qwen3_vl", QWEN3_VL_4B.vit_parameters)
    assert model.shape == QWEN3_VL_4B_SHAPE


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_read_from_a_config_are_those_of_the_model_itself(family: str) -> None:
    path = build_checkpoint(family)
    model, config = read_model(path), AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        whole = AutoModelForImageTextToText.from_config(config)
    layers = whole.model.language_model.layers
    weights = sum(each.numel() for each in layers.parameters() if each.dim() == 2)
    assert model.geometry.text_parameters == weights
    assert model.geometry.head_parameters == whole.lm_head.weight.numel()


@pytest.mark.parametrize(
    ("fields", "rows"),
    [
        ({}, 1024),
        ({"downsample_ratio": 0.5}, 256),
        ({"mm_tokens_per_image": 256}, 256),
        ({"scale_factor": 4}, 64),
    ],
)
def test_a_picture_of_one_size_has_the_rows_that_its_projector_leaves(tmp_path, fields, rows):
    shape = read(tmp_path, **fields).shape
    assert shape.plan(1280, 720) == (32 * 32, rows) == shape.plan(64, 64)


@pytest.mark.parametrize("field", ["spatial_merge_size", "merge_kernel_size", "downsample_factor"])
def test_a_picture_of_any_size_has_a_row_for_each_square_of_patches(tmp_path: Path, field: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 1, "max_pixels": 280 * 280}))
    shape = read(tmp_path, **{field: [2, 2]}).shape
    assert shape.plan(56, 28) == (8, 2)
    assert shape.plan(1120, 1120) == (400, 100)


def test_experts_are_stored_whole_and_used_in_part(tmp_path: Path) -> None:
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
    }
    geometry = read(tmp_path, experts).geometry
    assert (geometry.intermediate, geometry.stored_intermediate) == (3 * 16, 9 * 16)
    assert geometry.stored_parameters - geometry.text_parameters == 2 * 3 * 64 * 6 * 16 + 64 * 512


def test_recurrent_layers_keep_no_keys_and_values(tmp_path: Path) -> None:
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    assert 2 * read(tmp_path, kinds).geometry.kv_token_bytes == read(tmp_path).geometry.kv_token_bytes


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("[1]", "is not a JSON object"),
        ("{", "is not JSON"),
        ('{"model_type": "llama"}', "has no vision_config: plans are for models that take images"),
        ('{"vision_config": {"patch_size": 14}}', "does not say image_size"),
        (json.dumps({"vision_config": VISION}), "does not say hidden_size or n_embd: add it to a copy"),
        (json.dumps({"vision_config": VISION, "hidden_size": "wide"}), "does not say hidden_size"),
        (
            json.dumps({"vision_config": VISION, "text_config": TEXT | {"layer_types": 3, "hidden_size": 0}}),
            "hidden_size",
        ),
        (json.dumps({"vision_config": [], "text_config": 3}), "has no vision_config"),
    ],
)
def test_a_config_without_a_size_is_refused_by_the_name_of_its_field(tmp_path, config, said):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=f"--model .*{said}"):
        read_model(tmp_path)


def test_a_folder_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="--model /nowhere: .*No such file"):
        read_model(Path("/nowhere"))


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


def test_parameters_of_qwen3_vl_4b_are_those_of_its_config() -> None:
    # A layer: 2560 x 4096 twice, 2560 x 1024 twice, 2560 x 9728 three times.
    assert QWEN3_VL_4B.text_parameters == 36 * (2 * 2560 * 4096 + 2 * 2560 * 1024 + 3 * 2560 * 9728)
    assert QWEN3_VL_4B.text_parameters + QWEN3_VL_4B.head_parameters == 4_022_272_000
    # A block: 4 x 1024² + 2 x 1024 x 4096; the patch embedding takes 2 x 3 x 16 x 16 numbers to 1024.
    assert QWEN3_VL_4B.vit_parameters == 24 * 12 * 1024**2 + 1536 * 1024
    assert QWEN3_VL_4B.merger_parameters == 4 * (4096 * 4096 + 4096 * 2560)

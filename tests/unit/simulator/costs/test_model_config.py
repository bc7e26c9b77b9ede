"""`plan --model`: the sizes in a config.json, against the models themselves and figures computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from support.data.checkpoints import FAMILIES, build_checkpoint
from triptych.base.errors import ConfigError
from triptych.simulator.costs.costs import QWEN3_VL_4B, QWEN3_VL_4B_SHAPE
from triptych.simulator.costs.model_config import PlannedModel, read_model

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
def test_a_picture_of_one_size_has_the_rows_that_its_projector_leaves(
    tmp_path: Path, fields: dict[str, Any], rows: int
) -> None:
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
def test_a_config_without_a_size_is_refused_by_the_name_of_its_field(
    tmp_path: Path, config: str, said: str
) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=f"--model .*{said}"):
        read_model(tmp_path)


def test_a_folder_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="--model /nowhere: .*No such file"):
        read_model(Path("/nowhere"))

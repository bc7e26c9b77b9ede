"""What the adapter knows of a class by its config alone, and checkpoints that lack something."""

from __future__ import annotations

import copy
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from support.data.checkpoints import edit_text_config
from support.data.retrievers import build_retriever
from support.zoo.checkpoint import checkpoint
from support.zoo.models import RECIPES
from support.zoo.recipe import IMAGE, VIDEO
from triptych.base.errors import ConfigError
from triptych.models.checkpoint.config import load_config
from triptych.models.generic.decoder import GenericDecoder
from triptych.models.generic.encoder import GenericEncoder
from triptych.models.generic.examine import Examined, examine
from triptych.models.generic.probe import check_layer_types
from triptych.models.geometry import KVShape, LayerRule, SpanRule
from triptych.models.parallel.tensor_parallel import TensorParallel


def config_of(family: str) -> Any:
    recipe = RECIPES[f"{family}ForConditionalGeneration"]
    config = getattr(transformers, recipe.architecture).config_class(**copy.deepcopy(recipe.config))
    config.architectures = [recipe.architecture]
    return config


def examined(family: str) -> Examined:
    return examine(config_of(family))


@pytest.mark.parametrize(
    ("architecture", "rules"),
    [("ColQwen2ForRetrieval", SpanRule.NONE), ("ColPaliForRetrieval", SpanRule.CUT)],
)
def test_a_retriever_s_base_knows_of_no_pictures_where_it_embeds_tokens_itself(
    architecture: str, rules: SpanRule, tmp_path: Path
) -> None:
    """ColQwen2's is Qwen2-VL's, which counts three rows of positions where it knows of pictures."""
    known = examine(load_config(build_retriever(architecture, tmp_path)))
    assert known.geometry.position_rows == 1
    assert {rule.spans for rule in known.rules} == {rules}


def test_a_text_model_in_which_all_tokens_attend_to_one_another_is_not_served() -> None:
    text = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    tokens = dict.fromkeys(
        ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0
    )
    inner = {"text_config": {**text, **tokens, "num_hidden_layers": 2}, "image_token_id": IMAGE}
    config = transformers.ColModernVBertConfig(vlm_config={"model_type": "modernvbert", **inner})
    config.architectures = ["ColModernVBertForRetrieval"]
    config.image_token_id = IMAGE
    with pytest.raises(ConfigError, match="ColModernVBertForRetrieval: all tokens attend to one another"):
        examine(config)


def test_a_window_cuts_the_spans_of_every_layer_of_gemma3() -> None:
    sliding, full = LayerRule(6, None, SpanRule.CUT), LayerRule(None, None, SpanRule.CUT)
    assert examined("Gemma3").rules == (sliding, full, sliding)


def test_windows_without_spans() -> None:
    sliding, full = LayerRule(8, None, SpanRule.NONE), LayerRule(None, None, SpanRule.NONE)
    assert examined("AyaVision").rules == (sliding, full, sliding)


def test_keys_and_values_of_latent_attention_differ_in_width() -> None:
    geometry = examined("Kimi_K25").geometry
    assert geometry.kv_shapes == (KVShape(4, 24, 12),) * 3
    assert geometry.token_elements == 3 * 4 * (24 + 12)


def test_deepstack_levels_and_rows_of_positions() -> None:
    geometry = examined("Qwen3VLMoe").geometry
    assert (geometry.deepstack_levels, geometry.position_rows, geometry.kv_shapes) == (2, 3, ())


def test_a_text_needs_no_capture_unless_it_attends_both_ways_or_has_inputs_of_its_own() -> None:
    assert examined("Qwen3VLMoe").counts_text and examined("LlavaNext").counts_text
    assert not examined("PaliGemma").counts_text
    assert not examined("Ernie4_5_VLMoe").counts_text


def test_tokens_that_a_config_names_are_marks_but_those_around_every_text() -> None:
    config = config_of("Qwen3VLMoe")
    marks = examine(config).marks
    assert {config.image_token_id, config.video_token_id, config.vision_start_token_id} <= marks
    assert not marks & {config.text_config.bos_token_id, config.text_config.eos_token_id}


def test_placeholders_that_a_class_embeds_as_padding_are_known() -> None:
    assert dict(examined("Kimi_K25").embedded) == {IMAGE: 0, VIDEO: 0}


def test_recurrent_layers_have_states_and_no_keys_and_values() -> None:
    geometry = examine(config_of("Lfm2Vl"), torch.bfloat16).geometry
    assert geometry.kv_shapes == (KVShape(0, 0, 0), KVShape(2, 16, 16), KVShape(0, 0, 0))
    assert [(s.key, s.shape, s.dtype) for s in geometry.states] == [
        (("conv", layer, 0), (64, 3), torch.bfloat16) for layer in (0, 2)
    ]
    assert geometry.slot_bytes == 2 * 64 * 3 * 2


def test_layers_that_keep_something_else_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="Sparse has layers of type indexed_attention"):
        check_layer_types("Sparse", SimpleNamespace(layer_types=["conv", "indexed_attention"]))


def test_a_class_that_transformers_lacks_is_refused_without_remote_code() -> None:
    config = config_of("LlavaNext")
    config.architectures = ["NotThereForConditionalGeneration"]
    with pytest.raises(ConfigError, match="NotThereForConditionalGeneration is not in transformers"):
        examine(config)


def test_a_model_of_text_alone_is_refused() -> None:
    config = transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32, intermediate_size=16
    )
    config.architectures = ["LlamaForCausalLM"]
    with pytest.raises(ConfigError, match="takes text alone"):
        examine(config)


def test_a_rows_dependence_on_the_prompt_is_known() -> None:
    assert examined("LlavaOnevision").one_item
    assert not examined("LlavaNext").one_item


CPU = {"device": torch.device("cpu"), "dtype": torch.float32}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    shutil.copytree(checkpoint("LlavaNextForConditionalGeneration"), path)
    return path


def without(folder: Path, part: str) -> str:
    """Takes the first tensor with `part` in its name out of the checkpoint; its name."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if part in name)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    return name


def test_a_tensor_that_is_missing_is_named_by_the_side_that_needs_it(folder: Path) -> None:
    without(folder, "layers.1.mlp")
    with pytest.raises(ConfigError, match=r"lacks tensors: .*layers\.1\.mlp.*fetch the checkpoint again"):
        GenericDecoder.load(folder, **CPU, attn_implementation="sdpa")
    assert not any(p.is_meta for p in GenericEncoder.without_processor(folder, **CPU).module.parameters())


def test_the_other_sides_tensors_are_not_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("transformers")  # does not propagate
    logger.addHandler(caplog.handler)
    try:
        GenericDecoder.load(folder, **CPU, attn_implementation="sdpa")
    finally:
        logger.removeHandler(caplog.handler)
    assert "UNEXPECTED" not in caplog.text


def test_a_folder_without_a_processor_says_so(folder: Path) -> None:
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).unlink()
    with pytest.raises(ConfigError, match="processor"):
        GenericEncoder.load(folder, **CPU)
    with pytest.raises(ConfigError, match=r"give MODEL=/folder with preprocessor_config.json"):
        GenericEncoder.processor_config(folder)


def test_sizes_that_fit_no_tensor_are_one_line(folder: Path) -> None:
    edit_text_config(folder, intermediate_size=80)
    with pytest.raises(ConfigError, match="fit its config.json|misshapen"):
        GenericDecoder.load(folder, **CPU, attn_implementation="sdpa")


def test_ranks_that_do_not_divide_the_heads_are_refused_by_name(folder: Path) -> None:
    options = {**CPU, "attn_implementation": "sdpa"}
    with pytest.raises(ConfigError, match="--tensor-parallel one of 1, 2, 4"):
        GenericDecoder.load(folder, **options, parallel=TensorParallel(0, 3))

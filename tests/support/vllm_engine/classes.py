"""Checkpoints of the zoo's classes as vLLM reads them."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from support.sounds.classes import SOUNDS
from support.videos.classes import CLASSES as VIDEO_CLASSES
from support.zoo.checkpoint import own_processor, write_checkpoint
from support.zoo.models import RECIPES
from support.zoo.processors import OwnProcessor
from support.zoo.recipe import AUDIO, HIDDEN, IMAGE, VIDEO, Config, Recipe, Tensors
from triptych.base.vllm_classes import CLASSES
from triptych.models.registry import FAMILIES

#: The classes of the table that vLLM's CPU build runs.
RUN = tuple(name for name, known in CLASSES.items() if not known.not_run)
#: Those that take pictures and have no family of their own.
ADAPTED = tuple(
    sorted(
        name
        for name in RUN
        if "image" in CLASSES[name].modalities and name not in {family.architecture for family in FAMILIES}
    )
)
#: "CPU GDN attention requires BF16.", in which answers are not compared token by token.
IN_BFLOAT16 = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
#: Whose processors make pictures of any size larger, by PIL here and by torchvision in vLLM.
ALWAYS_RESIZED = ("Gemma4ForConditionalGeneration",)
_CLIPS = {entry.name: entry for entry in VIDEO_CLASSES if not entry.variation}
_SOUNDS = {entry.name: entry for entry in SOUNDS if not entry.sees}
#: The smallest attention head that vLLM's kernel for CPUs has.
_HEAD = 32
#: vLLM normalises pictures itself, by what is in the file.
_NORMALISED: Config = {
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "do_rescale": True,
    "do_normalize": True,
}
#: vLLM looks these up in Gemma 3's tokenizer.
_NEWLINES = {290 + count: "\n" * count for count in range(1, 5)}
_INTERLEAVED: Config = {"rope_parameters": {"mrope_interleaved": True}}
#: Fields of a text config that hubs have, vLLM reads and transformers 5 no longer writes.
_HUB_FIELDS: dict[str, Config] = {
    "Qwen3VLForConditionalGeneration": _INTERLEAVED,
    "Qwen3VLMoeForConditionalGeneration": {"norm_topk_prob": True, "num_experts": 8, **_INTERLEAVED},
    "Qwen3_5ForConditionalGeneration": _INTERLEAVED,
    "Qwen3_5MoeForConditionalGeneration": _INTERLEAVED,
    "Glm4vForConditionalGeneration": {"attention_bias": True},
    "Glm4vMoeForConditionalGeneration": {"use_qk_norm": False},
}
#: Of these, hubs have the experts' tensors the other way round than transformers 5 writes them.
_TRANSPOSED = ("Qwen3VLMoeForConditionalGeneration",)
_NESTED_TOWERS = ("Gemma3ForConditionalGeneration", "LlavaForConditionalGeneration")
#: These have no placeholders in their answers, as no trained model has: vLLM goes on behind one with its own
#: embedding, transformers with that of the padding.
_WITHOUT_PLACEHOLDERS = ("Gemma4ForConditionalGeneration",)


def recipe_of(architecture: str) -> Recipe:
    """The first recipe of a class."""
    return next(recipe for recipe in RECIPES.values() if recipe.architecture == architecture)


def class_checkpoint(architecture: str, folder: Path) -> Path:
    """A checkpoint that vLLM and our workers serve."""
    recipe = recipe_of(architecture)
    write_checkpoint(_with_wide_heads(recipe), folder, processor(recipe))
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    for name, value in _HUB_FIELDS.get(architecture, {}).items():
        text[name] = {**text[name], **value} if isinstance(value, dict) else value
    if architecture.startswith("Gemma4"):
        config["vision_config"]["default_output_length"] = 70
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "model.safetensors"
    save_file(_as_hubs(architecture, load_file(file)), file, {"format": "pt"})
    return folder


def mixed_checkpoint(architecture: str, folder: Path) -> Path:
    """The same, of a class that takes sounds, too, and with the settings for videos where it has them."""
    if (heard := _SOUNDS.get(architecture)) is not None:
        return heard.checkpoint(folder, _with_wide_heads)
    path = class_checkpoint(architecture, folder / "checkpoint")
    if (entry := _CLIPS.get(architecture)) is not None:
        settings = {"video_processor_type": entry.video_processor, **entry.settings}
        (path / "video_preprocessor_config.json").write_text(json.dumps(settings))
    return path


def _as_hubs(architecture: str, tensors: Tensors) -> Tensors:
    """The tensors as hubs have them, where vLLM reads no other way."""
    if architecture in _TRANSPOSED:
        return {
            name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
            for name, tensor in tensors.items()
        }
    if architecture in _NESTED_TOWERS:
        nested = "vision_tower.vision_model."
        return {name.replace("vision_tower.", nested): tensor for name, tensor in tensors.items()}
    if architecture in _WITHOUT_PLACEHOLDERS:
        # The head's rows, too.
        tensors["model.language_model.embed_tokens.weight"][[IMAGE, VIDEO, AUDIO]] = 0
    return tensors


def processor(recipe: Recipe) -> OwnProcessor:
    """The recipe's processor, with what vLLM asks its tokenizer for."""
    own = own_processor(recipe)
    assert own is not None
    own = dataclasses.replace(own, settings={**_NORMALISED, **own.settings})
    if recipe.architecture.startswith("Gemma3"):
        own = dataclasses.replace(own, strings={**own.strings, **_NEWLINES})
    return own


def _with_wide_heads(recipe: Recipe) -> Recipe:
    config = copy.deepcopy(dict(recipe.config))
    text = config["text_config"]
    rope = text.get("rope_parameters", {})
    if "mrope_section" in rope:
        rope["mrope_section"] = [count * _HEAD // text["head_dim"] for count in rope["mrope_section"]]
    # Some of vLLM's models divide the width by the number of heads.
    text |= {"head_dim": _HEAD, "num_attention_heads": HIDDEN // _HEAD, "num_key_value_heads": 1}
    if "linear_key_head_dim" in text:
        text |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    if recipe.architecture in _TRANSPOSED:
        # Not half the width: which way round such a tensor is could not be told.
        text["moe_intermediate_size"] = 48
    return dataclasses.replace(recipe, config=config)

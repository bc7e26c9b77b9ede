"""Tiny random checkpoints of every family: built once per content key, in any spelling a hub holds.

`variant` is a sum of traits, such as "hub+sharded":

hub         keys and config as the hub spells them (default: as transformers names its modules)
sharded     three files and an index (default: one file)
tied        no lm_head: the token embedding serves as head
list_eos    generation_config with two eos tokens
sampling    generation_config with do_sample, temperature, top_p and top_k
small       an image processor that shrinks images to a few patches (Qwen) or pads to a square (LLaVA)
scaled      token embeddings times the root of their width (BART)
summary     generation_config as summarisers have it: no trigram twice, a least length, beams (BART)
even        four attention heads, which two ranks can share, not five (T5)
six         six attention heads and three KV heads, which three ranks can share (Qwen3-VL)
wide        attention heads of 64 elements, a size that other engines' kernels have (decoder-only families)
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from support.data import tokenizers as styles
from support.encdec import checkpoints as encdec_checkpoints
from support.encdec import tokenizers as encdec_tokenizers
from support.encdec.checkpoints import FAMILIES as ENCDEC_FAMILIES
from support.encdec.checkpoints import Parts

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "llava")
TRAITS = frozenset(
    {"hub", "sharded", "tied", "list_eos", "sampling", "small", "scaled", "summary", "even", "six", "wide"}
)
VOCAB_SIZE = 768
_HIDDEN = 64
#: Hub spelling of a key, by family: what the published checkpoints hold.
_HUB_KEYS = {
    "qwen3_vl": (),
    "qwen2_5_vl": ((r"^model\.visual\.", "visual."), (r"^model\.language_model\.", "model.")),
    "llava": (
        (r"^model\.vision_tower\.(vision_model\.)?", "vision_tower.vision_model."),
        (r"^model\.multi_modal_projector\.", "multi_modal_projector."),
        (r"^model\.language_model\.", "language_model.model."),
        (r"^lm_head\.", "language_model.lm_head."),
    ),
    **encdec_checkpoints.HUB_KEYS,
}


def build_checkpoint(family: str, folder: Path | None = None, *, variant: str = "") -> Path:
    """A checkpoint folder of `family`; without `folder` the cached one, which must not be changed."""
    traits = frozenset(variant.split("+")) - {""}
    unknown = traits - TRAITS
    if unknown or family not in _BUILDERS:
        raise ValueError(f"no such checkpoint: {family} {sorted(unknown)}")
    cached = _cache() / "-".join([family, *sorted(traits)])
    if not cached.is_dir():
        _build_aside(cached, family, traits)
    if folder is None:
        return cached
    shutil.copytree(cached, folder, dirs_exist_ok=True)
    return folder


def edit_config(path: Path, name: str = "config.json", **changes: Any) -> Path:
    """Changes fields of a file of the checkpoint; those that become None go."""
    values = json.loads((path / name).read_text()) | changes
    _write_json(path / name, {key: value for key, value in values.items() if value is not None})
    return path


def edit_text_config(path: Path, **changes: Any) -> Path:
    """Changes fields of the decoder's part of the config."""
    config = json.loads((path / "config.json").read_text())
    (config.get("text_config") or config).update(changes)
    _write_json(path / "config.json", config)
    return path


def _cache() -> Path:
    """One folder per state of this code and of the libraries that decide the content."""
    key = hashlib.sha256()
    modules = (encdec_checkpoints, encdec_tokenizers, styles, sys.modules[__name__])
    for file in (*(Path(str(module.__file__)) for module in modules), styles.PIECES_FILE):
        key.update(file.read_bytes())
    for version in (torch.__version__, transformers.__version__, tokenizers.__version__):
        key.update(version.encode())
    return Path(tempfile.gettempdir()) / f"triptych-checkpoints-{os.getuid()}-{key.hexdigest()[:16]}"


def _build_aside(target: Path, family: str, traits: frozenset[str]) -> None:
    """Built in a folder of its own and renamed: concurrent builders never see half a checkpoint."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as aside:
        built = Path(aside) / "checkpoint"
        built.mkdir()
        _write(built, family, traits)
        try:
            built.rename(target)
        except OSError:
            if not target.is_dir():
                raise


def _write(folder: Path, family: str, traits: frozenset[str]) -> None:
    parts = _BUILDERS[family](traits)
    _randomise(parts.model, parts.randomise or _scale, seed=list(_BUILDERS).index(family))
    _quieten(parts.model, parts.tokenizer)
    with torch.no_grad():
        parts.model.get_output_embeddings().weight[list(parts.seldom)] *= 0.4
    parts.tokenizer.save_pretrained(folder)
    if parts.processor is not None:
        _write_json(folder / "preprocessor_config.json", parts.processor)
    _write_json(folder / "config.json", _config(parts.model, family, traits))
    _write_json(folder / "generation_config.json", _generation(parts.tokenizer, traits) | parts.generation)
    _write_tensors(folder, _tensors(parts.model, family, traits), sharded="sharded" in traits)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True), encoding="utf-8")


def _config(model: PreTrainedModel, family: str, traits: frozenset[str]) -> dict[str, Any]:
    config: dict[str, Any] = model.config.to_dict()
    config["architectures"] = [type(model).__name__]
    if "hub" in traits and family == "qwen2_5_vl":
        text = config.pop("text_config")
        rope = text.pop("rope_parameters")
        text["rope_theta"] = rope["rope_theta"]
        text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
        text.pop("layer_types", None)
        config = {**text, **config, "model_type": "qwen2_5_vl"}
    return config


def _generation(tokenizer: PreTrainedTokenizerFast, traits: frozenset[str]) -> dict[str, Any]:
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    values: dict[str, Any] = {
        "eos_token_id": [eos, pad] if "list_eos" in traits else eos,
        "pad_token_id": pad,
    }
    if "sampling" in traits:
        values |= {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    return values


def _tensors(model: PreTrainedModel, family: str, traits: frozenset[str]) -> dict[str, torch.Tensor]:
    tensors = dict(model.state_dict())
    if "tied" in traits and family in FAMILIES:
        tensors.pop("lm_head.weight")
    if family in ENCDEC_FAMILIES and "hub" not in traits:
        tensors = _once(model, tensors)
    rules = _HUB_KEYS[family] if "hub" in traits else ()
    renamed = {}
    for key, tensor in tensors.items():
        for pattern, replacement in rules:
            key, hits = re.subn(pattern, replacement, key)
            if hits:
                break
        renamed[key] = tensor.contiguous().clone()
    return renamed


def _once(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors without those that are another's, as transformers saves them."""
    tied = model.all_tied_weights_keys
    return {
        key: tensor
        for key, tensor in tensors.items()
        if key not in tied or not torch.equal(tensor, tensors[tied[key]])
    }


def _write_tensors(folder: Path, tensors: dict[str, torch.Tensor], *, sharded: bool) -> None:
    if not sharded:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = [f"model-{part + 1:05d}-of-00003.safetensors" for part in range(3)]
    weight_map = {key: names[index % 3] for index, key in enumerate(sorted(tensors))}
    for name in names:
        part = {key: tensors[key] for key, held_by in weight_map.items() if held_by == name}
        save_file(part, folder / name, metadata={"format": "pt"})
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


@torch.no_grad()
def _randomise(model: PreTrainedModel, scale: Callable[[str, torch.Tensor], float], *, seed: int) -> None:
    """Weights large enough that context, not the last token, decides, and that greedy output varies."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1 and "norm" in name and name.endswith("weight"):
            parameter.copy_(1 + 0.1 * noise)
        elif parameter.ndim == 1:
            parameter.copy_(noise * (0.3 if "class_embedding" in name else 0.05))
        else:
            parameter.copy_(noise * scale(name, parameter))


@torch.no_grad()
def _quieten(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Placeholders are never generated: no trained model puts them out."""
    rows = [
        tokenizer.convert_tokens_to_ids(text)
        for text in ("<|image_pad|>", "<|video_pad|>", "<|vision_pad|>", "<image>")
        if text in tokenizer.get_vocab()
    ]
    model.get_output_embeddings().weight[rows] *= 0.1


def _scale(name: str, parameter: torch.Tensor) -> float:
    if "embed_tokens" in name:
        return 0.4
    if "pos_embed" in name or "position_embedding" in name:
        return 0.3
    gain = 1.4
    if "q_proj" in name or "k_proj" in name:
        gain = 1.7
    elif "lm_head" in name:
        gain = 3.0
    return float(gain / parameter[0].numel() ** 0.5)


def _text_config(tokenizer: PreTrainedTokenizerFast, **extra: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": _HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **extra,
    }


def _qwen_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    return {
        "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    }


def _qwen_processor(traits: frozenset[str], **extra: Any) -> dict[str, Any]:
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 8,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        **extra,
    }


def _qwen3_vl(traits: frozenset[str]) -> Parts:
    tokenizer = styles.qwen_tokenizer(VOCAB_SIZE, default_system=False)
    sections, head_dim = ([12, 10, 10], 64) if "wide" in traits else ([3, 3, 2], 16)
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": sections, "mrope_interleaved": True}
    six = {"num_attention_heads": 6, "num_key_value_heads": 3} if "six" in traits else {}
    config = Qwen3VLConfig(
        text_config=_text_config(tokenizer, head_dim=head_dim, rope_parameters=rope, **six),
        vision_config={
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": _HIDDEN,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        tie_word_embeddings="tied" in traits,
        dtype="float32",
        **_qwen_ids(tokenizer),
    )
    longest = 1024 if "small" in traits else 65536
    processor = _qwen_processor(traits, size={"shortest_edge": 256, "longest_edge": longest})
    return Parts(Qwen3VLForConditionalGeneration(config), tokenizer, processor)


def _qwen2_5_vl(traits: frozenset[str]) -> Parts:
    tokenizer = styles.qwen_tokenizer(VOCAB_SIZE, default_system=True)
    # Its heads are as wide as its hidden size allows.
    wide = (
        {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1} if "wide" in traits else {}
    )
    sections = [8, 12, 12] if wide else [2, 3, 3]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    config = Qwen2_5_VLConfig(
        text_config=_text_config(tokenizer, rope_parameters=rope, **wide),
        vision_config={
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 32,
            "fullatt_block_indexes": [2],
            "out_hidden_size": wide.get("hidden_size", _HIDDEN),
        },
        tie_word_embeddings="tied" in traits,
        dtype="float32",
        **_qwen_ids(tokenizer),
    )
    longest = 1024 if "small" in traits else 65536
    processor = _qwen_processor(traits, min_pixels=256, max_pixels=longest)
    return Parts(Qwen2_5_VLForConditionalGeneration(config), tokenizer, processor)


def _llava(traits: frozenset[str]) -> Parts:
    tokenizer = styles.llava_tokenizer(VOCAB_SIZE)
    config = LlavaConfig(
        text_config=_text_config(
            tokenizer,
            model_type="llama",
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            tie_word_embeddings="tied" in traits,
            **({"head_dim": 64} if "wide" in traits else {}),
        ),
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 48,
            "patch_size": 8,
            "projection_dim": 64,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=36,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        tie_word_embeddings="tied" in traits,
        dtype="float32",
    )
    processor: dict[str, Any] = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 48},
        "crop_size": {"height": 48, "width": 48},
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    if "small" in traits:
        processor |= {"image_processor_type": "LlavaImageProcessor", "do_pad": True}
    return Parts(LlavaForConditionalGeneration(config), tokenizer, processor)


_BUILDERS: dict[str, Callable[[frozenset[str]], Parts]] = {
    "qwen3_vl": _qwen3_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "llava": _llava,
    **encdec_checkpoints.BUILDERS,
}

"""The checkpoint's config as transformers reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import ALLOWED_LAYER_TYPES
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from triptych.base.errors import ConfigError
from triptych.models.checkpoint.folder import own_names, read_config

#: Read at the top of every class's config.
_OF_WRAPPED = ("image_token_id", "vision_config", "vision_start_token_id", "vision_end_token_id")


def load_config(path: Path) -> PreTrainedConfig:
    """The config; ConfigError where config.json does not fit its model type.

    It names no quantization: what is computed here is not quantized in the file.
    """
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds, and of huggingface_hub's own
        raw, reason = read_config(path), " ".join(str(error).split())
        if raw.get("auto_map") and "custom code" in reason:
            raise ConfigError(
                f"MODEL={path} needs code of its own (auto_map in config.json), which is never run: give a "
                "checkpoint of a class of transformers, or install a package with an adapter of it"
            ) from error
        reason = unknown_type(raw) or f"does not fit its model type: {reason}: correct it"
        raise ConfigError(f"MODEL={path}: its config.json {reason}") from error
    if config.architectures:
        config.architectures = own_names(config.architectures)
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    # What a retriever's config has inside that of the model around which it is made.
    inner = getattr(config, "vlm_config", None)
    for name in _OF_WRAPPED:
        if (value := getattr(inner, name, None)) is not None and not hasattr(config, name):
            setattr(config, name, value)
    return config


def unknown_type(config: dict[str, Any]) -> str:
    """Why no model can be made of a config that names a rope or layer type which transformers lacks, and the
    remedy; empty where it names none. Towers have rope types of their own."""
    for what, name in _types(config, ""):
        known = {*ROPE_INIT_FUNCTIONS, "default", "mrope"} if what == "rope" else ALLOWED_LAYER_TYPES
        if name not in known:
            return (
                f"names the {what} type {name!r}, which transformers {transformers.__version__} does not "
                "have: upgrade it, or give another MODEL"
            )
    return ""


def _types(value: object, key: str) -> Iterator[tuple[str, str]]:
    """("rope" or "layer", name) of every rope and layer type of a config's decoder."""
    if key == "layer_types" and isinstance(value, list):
        yield from (("layer", str(name)) for name in value)
    elif isinstance(value, dict) and key.startswith("rope_"):
        name = value.get("rope_type") or value.get("type")
        yield from [("rope", str(name))] if name else []
        for each in value.values():
            yield from _types(each, key)
    elif isinstance(value, dict) and key not in ("vision_config", "audio_config"):
        for name, each in value.items():
            yield from _types(each, name)

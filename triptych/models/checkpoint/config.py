"""The checkpoint's config as transformers reads it."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from triptych.base.errors import ConfigError


def load_config(path: Path) -> PreTrainedConfig:
    """The config; ConfigError where config.json does not fit its model type."""
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # of many kinds, and of huggingface_hub's own
        reason = " ".join(str(error).split())
        raise ConfigError(f"MODEL={path}: its config.json does not fit its model type: {reason}") from error

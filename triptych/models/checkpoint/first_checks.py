"""What of a checkpoint is refused before a process is started or torch imported, in a second at most."""

from __future__ import annotations

from pathlib import Path

from triptych.base.config import EncoderConfig, PDConfig
from triptych.base.errors import ConfigError
from triptych.models.checkpoint.folder import (
    check_folder,
    check_image_processor,
    given_template,
    read_config,
)
from triptych.models.checkpoint.processor_libraries import check_processor_libraries
from triptych.models.checkpoint.quantized import check_for_engine
from triptych.models.checkpoint.support import check_supported, required_by_flags


def check_encoder_model(path: Path, flags: EncoderConfig) -> None:
    """ConfigError for a model that an encoder worker with these flags cannot load."""
    check_supported(path, required_by_flags(flags))
    check_folder(path, texts=False)
    check_image_processor(path)
    check_processor_libraries(path)


def check_pd_model(path: Path, flags: PDConfig) -> None:
    """ConfigError for a model that a PD worker with these flags cannot load or make tokens of."""
    check_supported(path, required_by_flags(flags))
    # Before vLLM the weights are read there, perhaps on another machine.
    check_folder(path, weights=flags.engine != "vllm" and not flags.engine_url)
    given_template(flags.chat_template)
    check_for_engine(path, flags)
    check_model_len(path, flags)


def check_model_len(path: Path, flags: PDConfig) -> None:
    """ConfigError for a --max-model-len above the decoder's positions, where config.json says them.

    vLLM, which `auto` may choose on a GPU, has rules of its own.
    """
    by_vllm = flags.engine == "vllm" or flags.engine_url or flags.device.startswith("cuda")
    if by_vllm and flags.engine != "native":
        return
    config = read_config(path)
    text = config.get("text_config", config)
    # Another value is refused where the class reads it.
    limit = text.get("max_position_embeddings") if isinstance(text, dict) else None
    if isinstance(limit, int):
        check_length(flags.max_model_len, limit)


def check_length(asked: int, limit: int) -> None:
    """ConfigError for a --max-model-len above the checkpoint's positions."""
    if asked > limit:
        raise ConfigError(f"--max-model-len {asked} is above the checkpoint's {limit} positions: lower it")

"""A checkpoint as a PD worker without weights needs it: prompts, tokenizer and identity."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from triptych.config import PDConfig
from triptych.errors import ConfigError
from triptych.models.base import DecoderSide, GenerationDefaults
from triptych.models.identity import ModelIdentity, model_identity
from triptych.models.registry import family_of, generation_defaults, resolve_dtype
from triptych.pd_worker.frontend.prompt import PromptBuilder, open_checkpoint


@dataclass(frozen=True, slots=True)
class FrontModel:
    """What the checkpoint's files say of prompts and requests. `decoder` has no weights."""

    name: str
    decoder: DecoderSide
    identity: ModelIdentity
    defaults: GenerationDefaults
    prompts: PromptBuilder
    tokenizer: Tokenizer
    max_model_len: int


def load_front_model(config: PDConfig, engine_max_model_len: int) -> FrontModel:
    """The checkpoint of `config.model`, in front of an engine that takes so many tokens."""
    path = Path(config.model)
    dtype = resolve_dtype(path, torch.device("cpu"), config.dtype)
    decoder = family_of(path).decoder.without_weights(path, dtype=dtype)
    if config.max_model_len > engine_max_model_len:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is more than the {engine_max_model_len} tokens that "
            "vLLM takes: lower it, or raise vLLM's --max-model-len"
        )
    longest = config.max_model_len or engine_max_model_len
    prompts, tokenizer = open_checkpoint(path, decoder, longest)
    return FrontModel(
        config.served_model_name or path.resolve().name,
        decoder,
        model_identity(path, dtype=dtype, revision=config.model_revision),
        generation_defaults(path),
        prompts,
        tokenizer,
        longest,
    )

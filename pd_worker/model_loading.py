"""Loads the decoder side of a checkpoint, with its prompts and tokenizer."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from triptych.config import PDConfig, format_size
from triptych.cpu.threads import decoder_threads, use_threads
from triptych.machine.device_memory import memory_of
from triptych.models.base import DecoderSide, GenerationDefaults
from triptych.models.checkpoint.support import check_supported, wanted_by_flags
from triptych.models.identity import ModelIdentity, model_identity
from triptych.models.registry import generation_defaults, load_decoder, resolve_device, resolve_dtype
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.attention.flex_start import prepare
from triptych.pd_worker.frontend.prompt import PromptBuilder, open_checkpoint
from triptych.pd_worker.runner.capacity import max_model_len, num_kv_blocks
from triptych.pd_worker.runner.memory_profile import size_kv_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint's decoder side, and what its files say."""

    path: Path
    name: str
    decoder: DecoderSide
    identity: ModelIdentity
    defaults: GenerationDefaults
    prompts: PromptBuilder
    tokenizer: Tokenizer
    #: --kv-memory, or the size found by profiling.
    kv_memory: int
    encoder_cache_memory: int = 0


def load_model(config: PDConfig, *, other_peak: int = 0) -> LoadedModel:
    """The checkpoint of `config.model`; ConfigError for one that cannot be served as configured.

    `other_peak` is what another model in this process takes of the device while it computes.
    """
    start = time.monotonic()
    path = Path(config.model)
    check_supported(path, wanted_by_flags(config))
    device = resolve_device(config.device)
    dtype = resolve_dtype(path, device, config.dtype)
    decoder = load_decoder(
        path,
        device=device,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        quantization=config.quantization,
    )
    use_threads(decoder_threads(config.threads, decoder.geometry.hidden_size))
    if config.attention_backend == "flex":
        prepare(path, decoder, config.block_size)
    config = _sized(config, decoder, other_peak)
    num_kv_blocks(config, decoder.geometry, dtype)
    longest = max_model_len(config, decoder.geometry, dtype)
    if not config.max_model_len and longest < decoder.geometry.max_position_embeddings:
        logger.info(
            "requests have up to %d of the checkpoint's %d tokens: --max-model-len, --kv-memory",
            longest,
            decoder.geometry.max_position_embeddings,
        )
    prompts, tokenizer = open_checkpoint(path, decoder, longest)
    identity = model_identity(
        path, dtype=dtype, revision=config.model_revision, quantization=config.quantization
    )
    size = format_size(sum(p.numel() * p.element_size() for p in decoder.module.parameters()))
    logger.info("loaded %s of decoder weights in %.1f s", size, time.monotonic() - start)
    name = config.served_model_name or path.resolve().name
    return LoadedModel(
        path,
        name,
        decoder,
        identity,
        generation_defaults(path),
        prompts,
        tokenizer,
        config.kv_memory,
        config.encoder_cache_memory,
    )


def _sized(config: PDConfig, decoder: DecoderSide, other_peak: int) -> PDConfig:
    """With the memory that the device has for KV cache and embeddings; on a CPU a given one is enough."""
    if config.kv_memory and decoder.device.type == "cpu":
        return config
    plan = size_kv_memory(config, decoder, memory_of(decoder.device), other_peak=other_peak)
    logger.info("memory of %s:\n%s", decoder.device, plan.table())
    return replace(config, kv_memory=plan.kv_memory, encoder_cache_memory=plan.needs.embeddings)

"""Loads the decoder side of a checkpoint, with its prompts and tokenizer."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from triptych.config import PDConfig, format_size
from triptych.models.base import DecoderSide, GenerationDefaults
from triptych.models.checkpoint.support import check_supported, wanted_by_flags
from triptych.models.identity import ModelIdentity, model_identity
from triptych.models.registry import generation_defaults
from triptych.pd_worker.frontend.prompt import PromptBuilder, open_checkpoint
from triptych.pd_worker.ranks.decoder_ranks import DecoderRanks
from triptych.pd_worker.ranks.share import load_share, sized
from triptych.pd_worker.runner.capacity import max_model_len, num_kv_blocks

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
    #: The other ranks, where `decoder` is rank 0's share; they have loaded theirs.
    ranks: DecoderRanks | None = None


def load_model(config: PDConfig, *, other_peak: int = 0) -> LoadedModel:
    """The checkpoint of `config.model`; ConfigError for one that cannot be served as configured.

    `config` is that of one rank, see `share_of_rank`; with several, the others are started and load, too.
    `other_peak` is what another model in this process takes of the device while it computes.
    """
    check_supported(Path(config.model), wanted_by_flags(config))
    if config.tensor_parallel == 1:
        return _load(config, None, other_peak)
    ranks = DecoderRanks(config)
    try:
        ranks.start()
        return _load(config, ranks, other_peak)
    except BaseException:
        ranks.close(seconds=0)
        raise


def _load(config: PDConfig, ranks: DecoderRanks | None, other_peak: int) -> LoadedModel:
    start = time.monotonic()
    path = Path(config.model)
    decoder = load_share(config, 0)
    dtype = decoder.dtype
    if ranks is None:
        config = sized(config, decoder, other_peak)
    else:
        ranks.join(decoder)
        kv_memory, embeddings = ranks.sized(config, decoder)
        config = replace(config, kv_memory=kv_memory, encoder_cache_memory=embeddings)
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
        ranks,
    )

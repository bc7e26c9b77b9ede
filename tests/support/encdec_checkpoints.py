"""Builders of the tiny random encoder-decoder checkpoints; `checkpoints.py` writes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from support import encdec_tokenizers as styles

HIDDEN = 64


@dataclass(frozen=True)
class Parts:
    """A model with its tokenizer; `processor` is preprocessor_config.json, `generation` adds to its file."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    processor: dict[str, Any] | None
    generation: dict[str, Any] = field(default_factory=dict)
    randomise: Callable[[str, torch.Tensor], float] | None = None


def _bart(traits: frozenset[str]) -> Parts:
    tokenizer = styles.bart_tokenizer(600)
    config = BartConfig(
        vocab_size=len(tokenizer),
        d_model=HIDDEN,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_position_embeddings=256,
        scale_embedding="scaled" in traits,
        dtype="float32",
    )
    generation = {
        "bos_token_id": 0,
        "decoder_start_token_id": 2,
        "forced_bos_token_id": 0,
        "forced_eos_token_id": 2,
    }
    if "summary" in traits:
        generation |= {"no_repeat_ngram_size": 3, "min_length": 12, "num_beams": 4, "max_length": 62}
    return Parts(BartForConditionalGeneration(config), tokenizer, None, generation, _scale)


def _scale(name: str, parameter: torch.Tensor) -> float:
    """Standard deviation of a matrix.

    Positions outweigh tokens, and feed-forward layers, whose outputs all lean to one side, are weak: else
    greedy output repeats one token, since the head is the embedding.
    """
    if "positions" in name:
        return 2.0
    if "shared" in name or "embed_tokens" in name:
        return 0.1
    gain = 1.4
    if "q_proj" in name or "k_proj" in name:
        gain = 1.5
    elif "fc2" in name:
        gain = 0.2
    elif "out_proj" in name:
        gain = 0.4
    return float(gain / parameter[0].numel() ** 0.5)


BUILDERS: dict[str, Callable[[frozenset[str]], Parts]] = {"bart": _bart}
FAMILIES = tuple(BUILDERS)
#: Hub spelling of a key, by family, as in checkpoints.py.
HUB_KEYS: dict[str, tuple[tuple[str, str], ...]] = {"bart": ((r"^model\.", ""),)}

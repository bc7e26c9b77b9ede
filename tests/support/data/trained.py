"""The two styles of tokenizer, trained once per test session."""

from __future__ import annotations

import functools

from transformers import PreTrainedTokenizerFast

from support.data import tokenizers as styles

VOCAB_SIZE = 600


@functools.cache
def tokenizer(style: str) -> PreTrainedTokenizerFast:
    """Style "qwen" is byte-level, "llava" has `▁` for spaces and bytes for unknown characters."""
    if style == "qwen":
        return styles.qwen_tokenizer(VOCAB_SIZE, default_system=False)
    return styles.llava_tokenizer(VOCAB_SIZE)

"""Timestamp tokens of speech models: told to the proxy, never part of the text."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.models.base import GenerationDefaults
from triptych.pd_worker.frontend.detokenizer import TokenDecoder
from triptych.types import TimestampTokens

#: Seconds between two timestamps; of all Whisper models.
STEP_SECONDS = 0.02


def timestamp_tokens(defaults: GenerationDefaults) -> TimestampTokens | None:
    """Where a checkpoint's timestamps begin: behind the token that says there will be none."""
    no_timestamps = defaults.extra.get("no_timestamps_token_id")
    return None if no_timestamps is None else TimestampTokens(int(no_timestamps) + 1, STEP_SECONDS)


class TimelessDecoder:
    """Leaves timestamps out of the text, which tokenizers do not count as special tokens."""

    def __init__(self, tokenizer: TokenDecoder, timestamps: TimestampTokens) -> None:
        self._tokenizer = tokenizer
        self._first = timestamps.first

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if skip_special_tokens:
            ids = [token for token in ids if token < self._first]
        return self._tokenizer.decode(ids, skip_special_tokens)

"""The detokenizer: turns output tokens into text, and decides when the output ends.

A pure function of the tokens: an attempt that replays another's tokens stands exactly where that one
stood, so that text continues at the character after the last one received.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Protocol

from triptych.base.errors import InvalidRequest
from triptych.base.types import FinishReason, TimestampTokens
from triptych.models.base import GenerationDefaults
from triptych.pd_worker.core.sampling import ResolvedSampling

#: Seconds between two timestamps of all Whisper models.
STEP_SECONDS = 0.02
_REPLACEMENT = "\ufffd"
#: A character has at most four bytes, hence tokens: a longer wait is for no character.
_LONGEST_WAIT = 8


class TokenDecoder(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class IncrementalDecoder:
    """Text of a growing list of tokens, never cut inside a character.

    Only a window of tokens is decoded: those of the last text returned, for the context that decoders
    need around spaces, and those still without text.
    """

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        #: Tokens of the window whose text was returned already, and that text.
        self._returned = 0
        self._returned_text = ""

    def append(self, token_id: int) -> str:
        """The text that is now certain."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if len(text) > len(self._returned_text) and not text.endswith(_REPLACEMENT):
            new = text[len(self._returned_text) :]
            self._advance(self._returned)
            return new
        if len(self._window) - self._returned > _LONGEST_WAIT:
            return self._stop_waiting(text)
        return ""

    def flush(self) -> str:
        """The rest, half characters as U+FFFD."""
        text = self._decode(self._window)
        new = text[len(self._returned_text) :]
        self._advance(self._returned)
        return new

    def _stop_waiting(self, text: str) -> str:
        """Everything but the last character, which may still be half."""
        if not text.endswith(_REPLACEMENT):
            # A run of special tokens, which have no text: the window can drop them.
            if self._decode(self._window[:-1]) == text:
                self._window.pop()
            return ""
        new = text[len(self._returned_text) : -1]
        for start in range(len(self._window) - 1, self._returned, -1):
            if self._decode(self._window[:start]) == text[:-1]:
                self._window, self._returned, self._returned_text = self._window[start:], 0, ""
                return new
        # The last character begins inside a token: the window stays whole.
        self._returned, self._returned_text = len(self._window), text[:-1]
        return new

    def _advance(self, start: int) -> None:
        self._window = self._window[start:]
        self._returned = len(self._window)
        self._returned_text = self._decode(self._window)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class OutputText:
    """One request's output as text, and its end.

    `resumed` are the output tokens of earlier attempts and `text_sent_chars` the characters of their text
    that were received; what is missing comes with the next token, or with `flush` when the resumed tokens
    ended the output already (then `finished` is set from the start). InvalidRequest when tokens follow
    that end. The decoded text stands alone: it is what the tokenizer makes of the output tokens.
    """

    def __init__(
        self,
        tokenizer: TokenDecoder,
        sampling: ResolvedSampling,
        resumed: Sequence[int] = (),
        text_sent_chars: int = 0,
    ) -> None:
        self.finished: FinishReason | None = None
        self.stop_sequence = ""
        self._sampling = sampling
        self._decoder = IncrementalDecoder(tokenizer)
        self._count = 0
        #: Decoded, but perhaps the beginning of a stop string.
        self._held = ""
        self._backlog = ""
        #: Characters that an earlier attempt has sent beyond what its tokens gave.
        self._skip = 0
        self._replay(resumed, text_sent_chars)

    def append(self, token_id: int) -> tuple[str, FinishReason | None]:
        """The text that may now be sent, and the reason when `token_id` was the last token."""
        text = self._append(token_id)
        return self._unsent(text), self.finished

    def flush(self) -> str:
        """The text held back, for a request that is ended from outside; empty after its own end."""
        text = "" if self.finished else self._held + self._decoder.flush()
        self._held = ""
        return self._unsent(text)

    def _append(self, token_id: int) -> str:
        if self.finished:
            raise InvalidRequest("output_token_ids go on after the end of the output", param="resume")
        self._count += 1
        may_stop = self._count > self._sampling.min_tokens
        if self._ends(token_id, may_stop):
            included = self._decoder.append(token_id) if self._sampling.include_stop_str_in_output else ""
            return self._end(FinishReason.STOP, included + self._decoder.flush(), may_stop)
        new = self._decoder.append(token_id)
        if self._count >= self._sampling.max_tokens:
            return self._end(FinishReason.LENGTH, new + self._decoder.flush(), may_stop)
        return self._release(new, may_stop)

    def _ends(self, token_id: int, may_stop: bool) -> bool:
        # Where a grammar is complete and allows no more, the output ends before min_tokens.
        early = self._sampling.constrained and token_id in self._sampling.eos_token_ids
        return (may_stop or early) and token_id in self._sampling.stop_token_ids

    def _release(self, new: str, may_stop: bool) -> str:
        """The text before a stop string, or up to its end, or all that cannot become one."""
        text = self._held + new
        begin, length = self._find_stop(text, len(self._held)) if may_stop else (-1, 0)
        if begin >= 0:
            self.finished, self._held = FinishReason.STOP, ""
            self.stop_sequence = text[begin : begin + length]
            return text[: begin + length * self._sampling.include_stop_str_in_output]
        keep = _pending(text, self._sampling.stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _end(self, reason: FinishReason, new: str, may_stop: bool) -> str:
        text = self._release(new, may_stop)
        if self.finished is None:
            self.finished = reason
            text, self._held = text + self._held, ""
        return text

    def _find_stop(self, text: str, known: int) -> tuple[int, int]:
        """Begin and length of the first stop string that ends after the `known` characters; or -1."""
        stops = self._sampling.stop
        places = [(text.find(stop, max(0, known - len(stop) + 1)), len(stop)) for stop in stops]
        return min((place for place in places if place[0] >= 0), default=(-1, 0))

    def _replay(self, resumed: Sequence[int], text_sent_chars: int) -> None:
        text = "".join([self._append(token_id) for token_id in resumed])
        self._backlog = text[text_sent_chars:]
        self._skip = max(0, text_sent_chars - len(text))

    def _unsent(self, text: str) -> str:
        skipped = min(self._skip, len(text))
        self._skip -= skipped
        text, self._backlog = self._backlog + text[skipped:], ""
        return text


def _pending(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string without being all of it."""
    longest = min(len(text), max((len(stop) for stop in stops), default=0) - 1)
    for length in range(longest, 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops if len(stop) > length):
            return length
    return 0


def timestamp_tokens(defaults: GenerationDefaults) -> TimestampTokens | None:
    """The timestamp tokens of a checkpoint: those after its `<|notimestamps|>` token."""
    no_timestamps = defaults.extra.get("no_timestamps_token_id")
    return None if no_timestamps is None else TimestampTokens(int(no_timestamps) + 1, STEP_SECONDS)


class TimelessDecoder:
    """A token decoder that drops timestamps, which tokenizers do not count as special tokens."""

    def __init__(self, tokenizer: TokenDecoder, timestamps: TimestampTokens) -> None:
        self._tokenizer = tokenizer
        self._first = timestamps.first

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if skip_special_tokens:
            ids = [token for token in ids if token < self._first]
        return self._tokenizer.decode(ids, skip_special_tokens)


class MarkerDecoder:
    """A token decoder that skips all special tokens but `kept`."""

    def __init__(self, tokenizer: TokenDecoder, kept: Set[int]) -> None:
        self._tokenizer = tokenizer
        self._kept = kept

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if not skip_special_tokens or self._kept.isdisjoint(ids):
            return self._tokenizer.decode(ids, skip_special_tokens)
        texts, begin = [], 0
        for index, token in enumerate(ids):
            if token in self._kept:
                texts.append(self._tokenizer.decode(ids[begin:index], True))
                texts.append(self._tokenizer.decode([token], False))
                begin = index + 1
        return "".join([*texts, self._tokenizer.decode(ids[begin:], True)])

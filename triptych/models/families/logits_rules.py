"""Rules that checkpoints of encoder-decoder models put on their outputs, as `generate` applies them.

Each is a small frozen value without state: on resume it is asked again with all output tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from triptych.base.types import Options
from triptych.models.base import Forbids, GenerationDefaults, LogitsRule, known_ids

_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Suppress(Forbids):
    """Tokens that are never generated."""

    token_ids: tuple[int, ...]

    def forbidden(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Sequence[int]:
        return self.token_ids


@dataclass(frozen=True, slots=True)
class SuppressAtBegin(Forbids):
    """Tokens that an output does not begin with. It begins at `shortest` tokens of the decoder, or later."""

    token_ids: tuple[int, ...]
    shortest: int = 0

    def forbidden(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Sequence[int]:
        begins = len(prompt_ids) + len(output_ids) == max(len(prompt_ids), self.shortest)
        return self.token_ids if begins else ()


@dataclass(frozen=True, slots=True)
class ForcedFirst:
    """The token behind a decoder prompt that is the start token alone."""

    token_id: int

    def apply(self, logits: torch.Tensor, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        if len(prompt_ids) + len(output_ids) == 1:
            _force(logits, (self.token_id,))


@dataclass(frozen=True, slots=True)
class ForcedLast:
    """The last token of an output that reaches its `max_tokens`."""

    token_ids: tuple[int, ...]
    max_tokens: int

    def apply(self, logits: torch.Tensor, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        if len(output_ids) == self.max_tokens - 1:
            _force(logits, self.token_ids)


@dataclass(frozen=True, slots=True)
class MinLength(Forbids):
    """No end before the decoder has `length` tokens, its prompt among them."""

    length: int
    eos_token_ids: tuple[int, ...]

    def forbidden(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Sequence[int]:
        return self.eos_token_ids if len(prompt_ids) + len(output_ids) < self.length else ()


@dataclass(frozen=True, slots=True)
class NoRepeatNgram(Forbids):
    """No run of `size` tokens twice, the decoder's prompt among them."""

    size: int

    def forbidden(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Sequence[int]:
        ids = [*prompt_ids, *output_ids]
        if len(ids) + 1 < self.size:
            return ()
        last = ids[len(ids) + 1 - self.size :]
        ends = range(self.size - 1, len(ids))
        return [ids[end] for end in ends if ids[end + 1 - self.size : end] == last]


@dataclass(frozen=True, slots=True)
class Only:
    """A restriction of the first position to these tokens, to detect the language."""

    token_ids: tuple[int, ...]

    def apply(self, logits: torch.Tensor, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        if output_ids:
            return
        kept = known_ids(self.token_ids, logits)
        scores = logits.index_select(0, kept)
        logits.fill_(_NEVER).index_copy_(0, kept, scores)


@dataclass(frozen=True, slots=True)
class Timestamps:
    """Whisper's timestamp rules: pairs that increase, one to begin with, one where all are likelier together.

    `first` is the token of 0.00 s, all above it are later; `last_initial` is the latest one to begin with,
    counted from `first`.
    """

    first: int
    eos_token_id: int
    last_initial: int | None = None

    def apply(self, logits: torch.Tensor, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        first = self.first
        logits[first - 1] = _NEVER  # <|notimestamps|>
        after_one = bool(output_ids) and output_ids[-1] >= first
        opens = after_one and not (len(output_ids) < 2 or output_ids[-2] >= first)
        if after_one and not opens:
            logits[first:] = _NEVER
        elif opens:
            logits[: self.eos_token_id] = _NEVER
        before = next((token for token in reversed(output_ids) if token >= first), first - 1)
        # The end of one segment may be the beginning of the next; the same time does not come a third time.
        logits[first : before if opens else before + 1] = _NEVER
        if not output_ids:
            logits[:first] = _NEVER
            if self.last_initial is not None:
                logits[first + self.last_initial + 1 :] = _NEVER
        scores = logits.log_softmax(dim=-1)
        # A branch would wait for the device.
        logits[:first].masked_fill_(scores[first:].logsumexp(dim=-1) > scores[:first].max(), _NEVER)


def checkpoint_rules(defaults: GenerationDefaults, options: Options) -> tuple[LogitsRule, ...]:
    """What the checkpoint's generation_config asks of every output.

    `options["max_tokens"]`, where given, is what the request's output may have at most.
    """
    extra = defaults.extra
    forced_first = extra.get("forced_bos_token_id")
    rules: list[LogitsRule] = []
    if size := int(extra.get("no_repeat_ngram_size") or 0):
        rules.append(NoRepeatNgram(size))
    if words := tuple(word[0] for word in extra.get("bad_words_ids") or () if len(word) == 1):
        rules.append(Suppress(words))
    if (length := int(extra.get("min_length") or 0)) and defaults.eos_token_ids:
        rules.append(MinLength(length, defaults.eos_token_ids))
    if suppressed := tuple(extra.get("suppress_tokens") or ()):
        rules.append(Suppress(suppressed))
    if begin := tuple(extra.get("begin_suppress_tokens") or ()):
        rules.append(SuppressAtBegin(begin, 0 if forced_first is None else 2))
    if forced_first is not None:
        rules.append(ForcedFirst(int(forced_first)))
    forced_last, maximum = extra.get("forced_eos_token_id"), options.get("max_tokens")
    if forced_last is not None and maximum:
        ids = forced_last if isinstance(forced_last, list) else [forced_last]
        rules.append(ForcedLast(tuple(map(int, ids)), int(maximum)))
    return tuple(rules)


def _force(logits: torch.Tensor, token_ids: Sequence[int]) -> None:
    logits.fill_(_NEVER).index_fill_(0, known_ids(token_ids, logits), 0.0)

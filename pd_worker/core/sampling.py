"""Sampling and pooling parameters, with defaults filled in and checked against the model's limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from triptych.base.errors import ContextTooLong, InvalidRequest
from triptych.base.request import check_limits, check_lists
from triptych.base.types import (
    FinishReason,
    Logprobs,
    MinP,
    Penalty,
    RepetitionDivisor,
    SamplingParams,
)

if TYPE_CHECKING:
    from triptych.models.base import GenerationDefaults

N = TypeVar("N", int, float)

#: Below the first, sampling is greedy, and up to the second it is at the second, as in vLLM: logits that are
#: divided by less lose their accuracy.
_GREEDY_TEMPERATURE, _MIN_TEMPERATURE = 1e-5, 0.01


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """Sampling parameters of the sampler and the detokenizer, without gaps.

    `stop_token_ids` end the output and hold the end-of-sequence tokens unless `ignore_eos`.
    `temperature == 0` is greedy; `top_k == 0`, `top_p == 1`, `min_p == 0`, `repetition_penalty == 1` are
    off. An output with a grammar always ends at an end-of-sequence token: `ignore_eos` is False for it.
    """

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    eos_token_ids: tuple[int, ...]
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    choice: int = 0
    logprobs: int | None = None
    #: The output has a grammar, which alone decides when an end-of-sequence token is allowed.
    constrained: bool = False
    bad_words: tuple[str, ...] = ()
    #: Their token ids, see `bad_word_ids`.
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    include_stop_str_in_output: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def not_speculated(self) -> str:
        """The parameter beside which vLLM speculates no tokens, by name; empty: none is set."""
        if self.logit_bias:
            return "logit_bias"
        return "min_p" if self.min_p and not self.greedy else ""

    @property
    def penalties(self) -> dict[str, float]:
        """The penalties that are not off, by name."""
        names = ("presence_penalty", "frequency_penalty", "repetition_penalty")
        off = {"repetition_penalty": 1.0}
        return {name: value for name in names if (value := getattr(self, name)) != off.get(name, 0.0)}

    @property
    def reads_prompt(self) -> bool:
        """Whether tokens of the prompt count in a penalty."""
        return self.repetition_penalty != 1


def resolve(
    params: SamplingParams,
    defaults: GenerationDefaults,
    prompt_len: int,
    max_model_len: int,
    prompt_field: str = "messages",
    vocab_size: int | None = None,
) -> ResolvedSampling:
    """`params`, with the checkpoint's defaults where they are unset; InvalidRequest names the field.

    Everything is checked, since any process that can reach the port may have sent them.
    """
    available = _room(prompt_len, max_model_len, prompt_field)
    max_tokens = _max_tokens(params, defaults, available, prompt_len)
    if params.min_tokens < 0 or params.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}, but must be from 0 to max_tokens, here {max_tokens}",
            param="min_tokens",
        )
    check_lists(params)
    ignore_eos = params.ignore_eos and params.output_format is None
    eos = () if ignore_eos else defaults.eos_token_ids
    return ResolvedSampling(
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        temperature=_temperature(params, defaults),
        top_p=_top_p(params, defaults),
        top_k=_top_k(params, defaults),
        seed=params.seed,
        stop=params.stop,
        stop_token_ids=frozenset((*params.stop_token_ids, *eos)),
        ignore_eos=ignore_eos,
        eos_token_ids=defaults.eos_token_ids,
        min_p=_within("min_p", _either(params.min_p, defaults.sampling.min_p), MinP),
        presence_penalty=_within("presence_penalty", params.presence_penalty, Penalty),
        frequency_penalty=_within("frequency_penalty", params.frequency_penalty, Penalty),
        repetition_penalty=_within(
            "repetition_penalty",
            _either(params.repetition_penalty, defaults.sampling.repetition_penalty),
            RepetitionDivisor,
        ),
        logit_bias=_logit_bias(params, vocab_size),
        choice=params.choice,
        logprobs=_logprobs(params),
        constrained=params.output_format is not None,
        bad_words=params.bad_words,
        include_stop_str_in_output=params.include_stop_str_in_output,
    )


def _room(prompt_len: int, max_model_len: int, prompt_field: str) -> int:
    """Tokens left for the output."""
    available = max_model_len - prompt_len
    if available < 1:
        remedy = "shorten it"
        if prompt_field != "prompt":
            remedy = f"shorten {prompt_field} or send fewer or smaller images"
        raise ContextTooLong(
            f"the prompt has {prompt_len} tokens, but the model takes {max_model_len} with the output: "
            f"{remedy}",
            param=prompt_field,
        )
    return available


def _max_tokens(params: SamplingParams, defaults: GenerationDefaults, available: int, prompt_len: int) -> int:
    if params.max_tokens is None:
        return min(available, defaults.max_tokens or available)
    if not 1 <= params.max_tokens <= available:
        kind = ContextTooLong if params.max_tokens > available else InvalidRequest
        raise kind(
            f"max_tokens is {params.max_tokens}, but must be from 1 to {available}: the model takes "
            f"{prompt_len + available} tokens and the prompt has {prompt_len}",
            param="max_tokens",
        )
    return params.max_tokens


def _temperature(params: SamplingParams, defaults: GenerationDefaults) -> float:
    value = _either(params.temperature, defaults.sampling.temperature)
    if not (math.isfinite(value) and value >= 0):
        raise InvalidRequest("temperature must be a number from 0", param="temperature")
    return 0.0 if value < _GREEDY_TEMPERATURE else max(value, _MIN_TEMPERATURE)


def _top_p(params: SamplingParams, defaults: GenerationDefaults) -> float:
    value = _either(params.top_p, defaults.sampling.top_p)
    if not 0 < value <= 1:
        raise InvalidRequest("top_p must be above 0 and at most 1", param="top_p")
    return value


def _top_k(params: SamplingParams, defaults: GenerationDefaults) -> int:
    value = _either(params.top_k, defaults.sampling.top_k)
    # -1 is how vLLM's clients turn it off.
    if value < -1:
        raise InvalidRequest("top_k must be 1 or more; 0 or -1 turns it off", param="top_k")
    return max(value, 0)


def _either(value: N | None, default: N | None) -> N:
    """The client's, or the checkpoint's, which always has one."""
    either = default if value is None else value
    assert either is not None
    return either


def _within(name: str, value: float, kind: object) -> float:
    check_limits(name, value, kind)
    return value


def _logit_bias(params: SamplingParams, vocab_size: int | None) -> tuple[tuple[int, float], ...]:
    for token, _ in params.logit_bias:
        if vocab_size is not None and token >= vocab_size:
            raise InvalidRequest(
                f"logit_bias names token {token}, but the model has {vocab_size}", param="logit_bias"
            )
    return params.logit_bias


def _logprobs(params: SamplingParams) -> int | None:
    check_limits("logprobs", params.logprobs, Logprobs)
    return params.logprobs


def bad_word_ids(words: Sequence[str], encode: Callable[[str], Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The token ids of each word at a text's start and behind a blank.

    vLLM leaves the second out where it has another length, and lets the word through there. InvalidRequest
    for a word without tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in dict.fromkeys(words):
        first = tuple(encode(word.lstrip()))
        if not first:
            raise InvalidRequest("bad_words: one of them has no tokens", param="bad_words")
        after_blank = tuple(encode(f" {word.lstrip()}"))
        sequences[first] = None
        if after_blank[-len(first) :] != first:
            sequences[after_blank] = None
    return tuple(sequences)


def banned_ids(sequences: Sequence[Sequence[int]], output_ids: Sequence[int]) -> list[int]:
    """The ids that would complete one of `sequences` at the end of the output."""
    return [
        ids[-1]
        for ids in sequences
        if len(ids) <= len(output_ids) + 1
        and list(output_ids[len(output_ids) + 1 - len(ids) :]) == list(ids[:-1])
    ]


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a request's hidden states are pooled, without gaps.

    With `scores` the last token's logits give the score; `score_ids` as in `PoolingDefaults`. Else `method`
    gives a vector, of which `dimensions` elements are left (0: all), with a length of 1 if `normalize`. The
    method "token" gives one for each token; or, with `query`, a score: their MaxSim with these vectors.
    """

    method: str = "last"
    normalize: bool = True
    dimensions: int = 0
    scores: bool = False
    score_ids: tuple[int, ...] = ()
    query: bytes = b""

    @property
    def of_tokens(self) -> bool:
        return self.method == "token"

    @property
    def reads_all_rows(self) -> bool:
        """Whether hidden states before the last one count: the KV cache does not keep them."""
        return not self.scores and self.method != "last"


#: Of requests that sample nothing here.
NO_SAMPLING = ResolvedSampling(
    max_tokens=1,
    min_tokens=0,
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    seed=0,
    stop=(),
    stop_token_ids=frozenset(),
    ignore_eos=False,
    eos_token_ids=(),
)


class NoText:
    """The output of a request whose tokens are not detokenized here, or that has none."""

    finished: FinishReason | None = None
    stop_sequence = ""

    def append(self, token_id: int) -> tuple[str, FinishReason | None]:
        raise NotImplementedError("the request puts out no text here")

    def flush(self) -> str:
        return ""

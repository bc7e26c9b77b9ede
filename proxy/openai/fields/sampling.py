"""The request fields that say how tokens are chosen, as OpenAI's endpoints and vLLM's clients send them."""

from __future__ import annotations

from typing import Any

from triptych.errors import InvalidRequest
from triptych.proxy.call.output_format import format_of
from triptych.proxy.call.validation import MAX_LOGPROBS, check_sampling, in_range, seed_of
from triptych.proxy.openai.fields.unserved import UnservedBody
from triptych.types import OutputFormat, SamplingParams


class SamplingBody(UnservedBody, kw_only=True):
    """The part of a request body that every generating endpoint shares. Unknown fields do not fail."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None


def sampling_of(
    body: SamplingBody,
    *,
    max_tokens: int | None = None,
    logprobs: int | None = None,
    output_format: OutputFormat | None = None,
) -> SamplingParams:
    """The values in range, or InvalidRequest that names the field. The seed is drawn where none is given.

    `max_tokens`, `logprobs` (likeliest tokens to report; None: no report) and `output_format` are what an
    endpoint spells in fields of its own: they go before the body's.
    """
    stop = body.stop
    in_range("top_k", body.top_k, -1, 1 << 31)
    return check_sampling(
        SamplingParams(
            max_tokens=body.max_tokens if max_tokens is None else max_tokens,
            min_tokens=body.min_tokens or 0,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=0 if body.top_k == -1 else body.top_k,
            seed=seed_of(body.seed),
            stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=body.repetition_penalty,
            min_p=body.min_p,
            logit_bias=_bias_of(body.logit_bias or {}),
            logprobs=logprobs,
            output_format=output_format or format_of(body),
        )
    )


def chat_logprobs(logprobs: bool | None, top_logprobs: int | None) -> int | None:
    """How many likeliest tokens a chat request wants reported; None: no log-probabilities at all."""
    in_range("top_logprobs", top_logprobs, 0, MAX_LOGPROBS)
    if not logprobs:
        if top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true beside it", param="top_logprobs")
        return None
    return top_logprobs or 0


def _bias_of(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """The (token id, bias) pairs of a JSON object, whose keys are strings."""
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequest(f"logit_bias: {key[:40]!r} is no token id", param="logit_bias")
    return tuple((int(key), value) for key, value in bias.items())

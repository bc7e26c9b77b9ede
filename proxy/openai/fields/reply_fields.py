"""Fields of replies that several endpoints share: usage, timings, log-probabilities."""

from __future__ import annotations

from triptych.base.types import PositionLogprobs, TokenLogprob, Usage
from triptych.proxy.call.chat import Timings

Json = dict[str, object]
_STAGES = ("queue", "fetch", "encode", "save", "load", "prefill", "decode")
#: OpenAI's word for the log-probability of a token that cannot be.
_IMPOSSIBLE = -9999.0


def usage_body(usage: Usage, reasoning_tokens: int = 0) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        **({"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}} if reasoning_tokens else {}),
    }


def timings_body(timings: Timings) -> Json:
    items = [{"mm_hash": item.mm_hash, "cache": item.cache} for item in timings.items]
    return {stage: round(getattr(timings, stage), 6) for stage in _STAGES} | {"items": items}


def finite_logprob(logprob: float) -> float:
    """The log-probability as JSON can have it: minus infinity becomes OpenAI's word for it."""
    return max(logprob, _IMPOSSIBLE)


def position_logprobs(position: PositionLogprobs) -> Json:
    """One output position in the shape of the chat and Responses APIs."""
    return {**_token(position.chosen), "top_logprobs": [_token(token) for token in position.top]}


def _token(token: TokenLogprob) -> Json:
    return {"token": token.text, "logprob": finite_logprob(token.logprob), "bytes": list(token.utf8)}

"""Tokens of a stream as vLLM gives them, checked."""

from __future__ import annotations

import msgspec

from triptych.pd_worker.core.outputs import RawLogprobs
from triptych.pd_worker.vllm.http.errors import EngineGarbage


class RankedToken(msgspec.Struct):
    """A token of one position; `rank` 1 is the likeliest."""

    token_id: int
    logprob: float
    rank: int | None = None


class ChosenToken(RankedToken):
    """The chosen token of one position, and the likeliest ones."""

    top_logprobs: list[RankedToken] = []

    def raw(self, most: int) -> RawLogprobs:
        """As the native sampler reports them, with the `most` likeliest tokens."""
        ranked = sorted((one for one in self.top_logprobs if one.rank), key=lambda one: one.rank or 0)
        top = tuple((one.token_id, one.logprob) for one in ranked[:most])
        return RawLogprobs((self.token_id, self.logprob), top)


class TokenLogprobs(msgspec.Struct):
    content: list[ChosenToken] | None = None


class StreamChoice(msgspec.Struct):
    """New tokens of the request; `finish_reason` comes with the last ones."""

    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class StreamUsage(msgspec.Struct):
    prompt_tokens_details: PromptDetails | None = None


class StreamChunk(msgspec.Struct):
    """New tokens, or what is known of the request at its end."""

    choices: list[StreamChoice] = []
    usage: StreamUsage | None = None

    @property
    def cached_tokens(self) -> int:
        details = self.usage and self.usage.prompt_tokens_details
        return (details and details.cached_tokens) or 0


def check_tokens(chunk: StreamChunk, vocab_size: int) -> None:
    """EngineGarbage for token ids that the model lacks, or log-probabilities that are not theirs."""
    for choice in chunk.choices:
        token_ids = choice.token_ids or []
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise EngineGarbage(f"token ids beyond {vocab_size - 1}")
        logprobs = choice.logprobs and choice.logprobs.content
        if logprobs and [one.token_id for one in logprobs] != token_ids:
            raise EngineGarbage("log-probabilities of other tokens")

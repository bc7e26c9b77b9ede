"""Events of requests, which the engine emits after each step."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from triptych.errors import RequestError
from triptych.pd_worker.core.outputs import RawLogprobs
from triptych.pd_worker.core.request import EngineRequest, RequestState
from triptych.types import FinishReason, PDTimings, Placement, TimestampTokens, Usage


class EngineEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all events: the request and the attempt that an event belongs to."""

    request_id: str
    attempt: int
    proxy_id: str


class RequestAdmitted(EngineEvent, frozen=True, kw_only=True):
    """The bytes of all items are reserved: encoder jobs may run. Placements are in item order."""

    prompt_token_ids: tuple[int, ...]
    placements: tuple[Placement, ...]
    encoder_prompt_token_ids: tuple[int, ...] = ()
    timestamps: TimestampTokens | None = None


class ItemLoaded(EngineEvent, frozen=True, kw_only=True):
    """The item has arrived from the store after `seconds`."""

    mm_hash: str
    seconds: float


class ItemMissing(EngineEvent, frozen=True, kw_only=True):
    """The store has no usable value: encode it again. `damaged_digest` is empty when there was none."""

    mm_hash: str
    damaged_digest: str = ""


class NewTokens(EngineEvent, frozen=True, kw_only=True, gc=False):
    """New output. `position` counts the output tokens before these, earlier attempts included.

    `logprobs` are one per token where the request asked for them.
    """

    position: int
    token_ids: Sequence[int]
    text: str
    logprobs: tuple[RawLogprobs, ...] = ()


class RequestFinished(EngineEvent, frozen=True, kw_only=True):
    """The last event of an attempt. `error` is set exactly when the reason is ERROR."""

    reason: FinishReason
    usage: Usage
    timings: PDTimings
    error: RequestError | None = None


def admitted(state: RequestState) -> RequestAdmitted:
    """The event of a request whose items' bytes have been reserved."""
    request = state.request
    return RequestAdmitted(
        **request.names(),
        prompt_token_ids=tuple(request.prompt_token_ids),
        placements=tuple(feature.placement for feature in request.features),
        encoder_prompt_token_ids=request.encoder_prompt_token_ids,
        timestamps=request.timestamps,
    )


def new_tokens(
    state: RequestState, tokens: Sequence[int], text: str, logprobs: tuple[RawLogprobs, ...] = ()
) -> NewTokens:
    """The event of the last `tokens` of the output and the text that they complete."""
    request = state.request
    return NewTokens(
        request_id=request.request_id,
        attempt=request.attempt,
        proxy_id=request.proxy_id,
        position=len(request.output_token_ids) - len(tokens),
        token_ids=tokens,
        text=text,
        logprobs=logprobs,
    )


def finished(state: RequestState, reason: FinishReason, error: RequestError | None) -> RequestFinished:
    """The last event of a request, with its usage and timings."""
    request = state.request
    usage = Usage(request.num_prompt_tokens, len(request.output_token_ids), state.num_cached_tokens)
    return RequestFinished(
        **request.names(), reason=reason, error=error, usage=usage, timings=state.timings()
    )


def refused(request: EngineRequest, error: RequestError) -> RequestFinished:
    """The only event of a request that the scheduler does not hold."""
    usage = Usage(request.num_prompt_tokens, len(request.output_token_ids), 0)
    return RequestFinished(
        **request.names(), reason=FinishReason.ERROR, error=error, usage=usage, timings=PDTimings()
    )

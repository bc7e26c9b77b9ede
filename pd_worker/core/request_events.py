"""Events of requests, which the engine emits after each step, and the output that they report."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypedDict

import msgspec

from triptych.base.errors import InternalError, RequestError
from triptych.base.types import FinishReason, PDTimings, Placement, ReasoningMarkers, TimestampTokens, Usage
from triptych.pd_worker.core.outputs import Latencies, RawLogprobs
from triptych.pd_worker.core.request import EngineRequest, RequestState


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
    reasoning: ReasoningMarkers | None = None
    tool_format: str = ""


class ItemLoaded(EngineEvent, frozen=True, kw_only=True):
    """The item has arrived after `seconds`, by `path`: "store", "shm" or "peer"; "" where it was resident."""

    mm_hash: str
    seconds: float
    path: str = ""


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
    stop_sequence: str = ""
    #: The vector or the score of a pooled request, as little-endian float32.
    pooled: bytes = b""


class _Names(TypedDict):
    request_id: str
    attempt: int
    proxy_id: str


def _names(request: EngineRequest) -> _Names:
    return {"request_id": request.request_id, "attempt": request.attempt, "proxy_id": request.proxy_id}


def admitted(state: RequestState) -> RequestAdmitted:
    """The event of a request whose items' bytes have been reserved."""
    request = state.request
    return RequestAdmitted(
        **_names(request),
        prompt_token_ids=tuple(request.prompt_token_ids),
        placements=tuple(feature.placement for feature in request.features),
        encoder_prompt_token_ids=request.encoder_prompt_token_ids,
        timestamps=request.timestamps,
        reasoning=request.reasoning,
        tool_format=request.tool_format,
    )


def item_loaded(state: RequestState, mm_hash: str, seconds: float, path: str = "") -> ItemLoaded:
    return ItemLoaded(**_names(state.request), mm_hash=mm_hash, seconds=seconds, path=path)


def item_missing(state: RequestState, mm_hash: str, damaged_digest: str) -> ItemMissing:
    return ItemMissing(**_names(state.request), mm_hash=mm_hash, damaged_digest=damaged_digest)


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


def finished(
    state: RequestState, reason: FinishReason, error: RequestError | None, pooled: bytes = b""
) -> RequestFinished:
    """The last event of a request, with its usage and timings."""
    request = state.request
    return _finished(request, reason, error, state.num_cached_tokens, _timings(state), pooled)


def refused(request: EngineRequest, error: RequestError) -> RequestFinished:
    """The only event of a request that the scheduler does not hold."""
    return _finished(request, FinishReason.ERROR, error, 0, PDTimings())


def _finished(
    request: EngineRequest,
    reason: FinishReason,
    error: RequestError | None,
    cached: int,
    timings: PDTimings,
    pooled: bytes = b"",
) -> RequestFinished:
    return RequestFinished(
        **_names(request),
        reason=reason,
        usage=Usage(len(request.prompt_token_ids), len(request.output_token_ids), cached),
        timings=timings,
        error=error,
        stop_sequence=request.output.stop_sequence,
        pooled=pooled,
    )


def _timings(state: RequestState) -> PDTimings:
    """Seconds of each stage; 0 for those it never reached."""

    def span(start: float | None, end: float | None) -> float:
        return 0.0 if start is None or end is None else max(0.0, end - start)

    return PDTimings(
        queue=span(state.request.arrival, state.first_scheduled_at),
        load=span(state.admitted_at, state.items_at),
        prefill=span(state.first_scheduled_at, state.first_token_at),
        decode=span(state.first_token_at, state.last_token_at),
        work=state.work_seconds,
    )


logger = logging.getLogger(__name__)


class OutputProcessor:
    """Appends tokens to the outputs of running requests."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._latencies = Latencies()

    def append(
        self, state: RequestState, token: int, logprobs: RawLogprobs | None, now: float
    ) -> tuple[NewTokens | None, FinishReason | None, RequestError | None]:
        """The event of a new token; the reason, and for ERROR the error, where the output ends."""
        request = state.request
        if state.first_token_at is None:
            state.first_token_at = now
        self._note_latency(state, now)
        state.last_token_at = now
        try:
            text, reason = request.output.append(token)
        except Exception:
            logger.exception(
                "request %s: its output cannot be detokenized",
                request.name,
                extra=request.log_extra,
            )
            return None, FinishReason.ERROR, InternalError("the output could not be turned into text")
        state.output_token_ids.append(token)
        if reason is None and state.num_tokens >= self._max_model_len:
            reason = FinishReason.LENGTH
        if reason is not None:
            text += request.output.flush()
            self._latencies.whole.append(now - request.arrival)
        event = new_tokens(state, (token,), text, () if logprobs is None else (logprobs,))
        return event, reason, None

    def note_pooled(self, state: RequestState, now: float) -> None:
        """A pooled request has been computed: its prefill, and all of it, end now."""
        state.first_token_at = state.last_token_at = now
        self._latencies.whole.append(now - state.request.arrival)

    def drain_latencies(self) -> Latencies:
        """Latencies since the last call."""
        latencies, self._latencies = self._latencies, Latencies()
        return latencies

    def _note_latency(self, state: RequestState, now: float) -> None:
        if state.last_token_at is None:
            self._latencies.first_token.append(now - state.request.arrival)
        else:
            self._latencies.between_tokens.append(now - state.last_token_at)

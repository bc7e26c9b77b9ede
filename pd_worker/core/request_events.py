"""Events of requests, which the engine emits after each step, and the output that they report."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict

from triptych.base.delta import Delta
from triptych.base.errors import InternalError, RequestError
from triptych.base.types import FinishReason
from triptych.pd_worker.core.outputs import Latencies, RawLogprobs
from triptych.pd_worker.core.request import EngineRequest, RequestState
from triptych.protos.convert import error_to_proto
from triptych.protos.pd_pb2 import (
    Admitted,
    Finished,
    ItemLoaded,
    ItemMissing,
    ItemPlacement,
    ReasoningMarkers,
    RequestEvent,
    TimestampTokens,
)

#: New output, or any other event as the proxy gets it.
EngineEvent = Delta[RawLogprobs] | RequestEvent


def admitted(state: RequestState) -> RequestEvent:
    """The event of a request whose items' bytes have been reserved."""
    request = state.request
    times, reasoning = request.timestamps, request.reasoning
    places = [feature.placement for feature in request.features]
    body = Admitted(
        prompt_token_ids=request.prompt_token_ids,
        placements=[ItemPlacement(offset=place.offset, length=place.length) for place in places],
        encoder_prompt_token_ids=request.encoder_prompt_token_ids,
        timestamps=None if times is None else TimestampTokens(first=times.first, seconds=times.seconds),
        reasoning=None if reasoning is None else ReasoningMarkers(**asdict(reasoning)),
        tool_format=request.tool_format,
    )
    return _event(request, admitted=body)


def item_loaded(state: RequestState, mm_hash: str, seconds: float, path: str = "") -> RequestEvent:
    body = ItemLoaded(mm_hash=mm_hash, seconds=seconds, path=path)
    return _event(state.request, item_loaded=body)


def item_missing(state: RequestState, mm_hash: str, damaged_digest: str) -> RequestEvent:
    body = ItemMissing(mm_hash=mm_hash, damaged_digest=damaged_digest)
    return _event(state.request, item_missing=body)


def new_tokens(
    state: RequestState, tokens: Sequence[int], text: str, logprobs: Sequence[RawLogprobs] = ()
) -> Delta[RawLogprobs]:
    """The event of the last `tokens` of the output and the text that they complete."""
    request = state.request
    position = len(request.output_token_ids) - len(tokens)
    return Delta(text, tokens, logprobs, 0, request.request_id, request.attempt, request.proxy_id, position)


def finished(
    state: RequestState, reason: FinishReason, error: RequestError | None, pooled: bytes = b""
) -> RequestEvent:
    """The last event of a request, with its usage and the seconds of each stage: 0 of those not reached."""

    def span(start: float | None, end: float | None) -> float:
        return 0.0 if start is None or end is None else max(0.0, end - start)

    body = _finished(state.request, reason, error)
    body.cached_tokens, body.pooled = state.request.cached_tokens or 0, pooled
    body.queue_seconds = span(state.request.arrival, state.first_scheduled_at)
    body.load_seconds = span(state.admitted_at, state.items_at)
    body.prefill_seconds = span(state.first_scheduled_at, state.first_token_at)
    body.decode_seconds = span(state.first_token_at, state.last_token_at)
    body.work_seconds = state.work_seconds
    return _event(state.request, finished=body)


def refused(request: EngineRequest, error: RequestError) -> RequestEvent:
    """The only event of a request that the scheduler does not hold."""
    return _event(request, finished=_finished(request, FinishReason.ERROR, error))


def _finished(request: EngineRequest, reason: FinishReason, error: RequestError | None) -> Finished:
    return Finished(
        reason=reason.value,
        error=None if error is None else error_to_proto(error),
        prompt_tokens=len(request.prompt_token_ids),
        completion_tokens=len(request.output_token_ids),
        stop_sequence=request.output.stop_sequence,
    )


def _event(
    request: EngineRequest,
    *,
    admitted: Admitted | None = None,
    item_loaded: ItemLoaded | None = None,
    item_missing: ItemMissing | None = None,
    finished: Finished | None = None,
) -> RequestEvent:
    return RequestEvent(
        request_id=request.request_id,
        attempt=request.attempt,
        proxy_id=request.proxy_id,
        admitted=admitted,
        item_loaded=item_loaded,
        item_missing=item_missing,
        finished=finished,
    )


logger = logging.getLogger(__name__)


class OutputProcessor:
    """Appends tokens to the outputs of running requests."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._latencies = Latencies()

    def append(
        self, state: RequestState, token: int, logprobs: RawLogprobs | None, now: float
    ) -> tuple[Delta[RawLogprobs] | None, FinishReason | None, RequestError | None]:
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

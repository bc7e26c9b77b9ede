"""Appends sampled tokens to requests: detokenizes them and decides when the output ends."""

from __future__ import annotations

import logging

from triptych.base.errors import InternalError, RequestError
from triptych.base.types import FinishReason
from triptych.pd_worker.core import request_events
from triptych.pd_worker.core.outputs import RawLogprobs
from triptych.pd_worker.core.request import RequestState
from triptych.pd_worker.core.request_events import NewTokens
from triptych.pd_worker.core.stats import Latencies

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
        event = request_events.new_tokens(state, (token,), text, () if logprobs is None else (logprobs,))
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

"""What PD workers tell of requests, turned into what the requests' state machines make of it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping

from triptych.errors import InternalError, RequestError, Unavailable
from triptych.protos import pd_pb2
from triptych.protos.convert import error_from_proto
from triptych.proxy.call.chat import Delta
from triptych.proxy.pd.suspects import MAX_LOSSES
from triptych.proxy.pd.wire import started_from_proto, with_logprobs
from triptych.proxy.requests.flow import Flow
from triptych.proxy.requests.lifecycle import Instruction
from triptych.types import Usage

logger = logging.getLogger(__name__)


class PDNews:
    """The router's sink. `carry_out` takes a request's instructions; `leave_in_peace` lets a request go from
    its PD worker, which has ended it already."""

    def __init__(
        self,
        flows: Mapping[str, Flow],
        carry_out: Callable[[Flow, Iterable[Instruction]], None],
        leave_in_peace: Callable[[Flow], None],
    ) -> None:
        self._flows = flows
        self._carry_out = carry_out
        self._leave_in_peace = leave_in_peace

    def events(self, events: Iterable[pd_pb2.RequestEvent]) -> None:
        """One step's news. Nearly all of it is tokens, which take no detour over instructions."""
        flows = self._flows
        for event in events:
            flow = flows.get(event.request_id)
            if flow is None:
                continue
            try:
                tokens = event.tokens
                token_ids = tokens.token_ids[:]
                if not token_ids and not event.HasField("tokens"):
                    self._event(flow, event)
                    continue
                shown = flow.lifecycle.tokens(event.attempt, tokens.position, token_ids, tokens.text)
                if isinstance(shown, Delta):
                    if flow.call.sampling.logprobs is not None and tokens.logprobs:
                        shown = with_logprobs(shown, tokens.logprobs)
                    flow.emit_tokens(shown)
                else:
                    self._carry_out(flow, shown)
            except Exception as error:
                self._end(flow, error)

    def accepted(self, flow: Flow, attempt: int) -> None:
        self._carry_out(flow, flow.lifecycle.accepted(attempt))

    def refused(self, flow: Flow, attempt: int, error: RequestError) -> None:
        self._carry_out(flow, flow.lifecycle.refused(attempt, error))

    def lost(self, request_id: str, attempt: int) -> None:
        if flow := self._flows.get(request_id):
            self._carry_out(flow, flow.lifecycle.worker_lost(attempt))

    def poison(self, request_id: str) -> None:
        """The request was alone when a PD worker ended, and present twice before: it is not tried again."""
        if flow := self._flows.get(request_id):
            error_id = secrets.token_hex(8)
            logger.error("request %s ended %d PD workers, error id %s", flow.name, MAX_LOSSES, error_id)
            message = (
                f"{MAX_LOSSES} PD workers ended while the request was at work in them, the last one with "
                f"nothing else; it is not tried again (error id {error_id})"
            )
            self._carry_out(flow, flow.lifecycle.fail(InternalError(message)))

    def _end(self, flow: Flow, error: Exception) -> None:
        """What makes no sense ends its request, and not the stream that all requests share."""
        logger.warning("request %s: its PD worker's event makes no sense: %r", flow.name, error)
        self._carry_out(flow, flow.lifecycle.fail(InternalError("the PD worker's answer makes no sense")))

    def _event(self, flow: Flow, event: pd_pb2.RequestEvent) -> None:
        machine, attempt, kind = flow.lifecycle, event.attempt, event.WhichOneof("body")
        if kind == "finished":
            self._finished(flow, attempt, event.finished)
        elif kind == "admitted":
            placements = [(place.offset, place.length) for place in event.admitted.placements]
            started = started_from_proto(event.admitted)
            self._carry_out(flow, machine.admitted(attempt, started.prompt_token_ids, placements, started))
        elif kind == "item_loaded":
            self._carry_out(flow, machine.item_loaded(attempt, event.item_loaded.mm_hash))
        elif kind == "item_missing":
            missing = event.item_missing
            self._carry_out(flow, machine.item_missing(attempt, missing.mm_hash, missing.damaged_digest))
        elif kind == "lost":
            self.lost(event.request_id, attempt)

    def _finished(self, flow: Flow, attempt: int, finished: pd_pb2.Finished) -> None:
        machine = flow.lifecycle
        if finished.reason in ("error", "abort"):
            error: RequestError = InternalError("the PD worker aborted the request")
            if finished.HasField("error"):
                error = error_from_proto(finished.error)
            if finished.reason == "abort" or isinstance(error, Unavailable):
                self._leave_in_peace(flow)
                self._carry_out(flow, machine.worker_lost(attempt))
                return
            self._carry_out(flow, machine.refused(attempt, error))
            return
        timings = machine.timings
        timings.queue = finished.queue_seconds
        timings.load = finished.load_seconds
        timings.prefill = finished.prefill_seconds
        timings.decode = finished.decode_seconds
        usage = Usage(finished.prompt_tokens, finished.completion_tokens, finished.cached_tokens)
        self._carry_out(flow, machine.finished(attempt, finished.reason, usage))

"""Spans of one request in the proxy, made from the instructions and events of its state machine."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.proxy.call.chat import Done, Started
from triptych.proxy.ports import JobReady
from triptych.proxy.requests.instructions import (
    Emit,
    EndAttempt,
    Fail,
    Instruction,
    LookUpItems,
    StartJobs,
    Submit,
)
from triptych.tracing import attributes as names
from triptych.tracing.attributes import Value
from triptych.tracing.context import SpanContext, hex_trace_id
from triptych.tracing.server_span import ServerSpan
from triptych.tracing.tracer import Span, SpanKind


@dataclass(slots=True)
class _OpenAttempt:
    """An attempt that has not ended. `end` is set before its span ends where that waits for its outcome."""

    span: Span
    start: float
    accepted: bool = False
    end: float | None = None


class RequestTrace:
    """The spans of one choice under the server span of its call. It sees no token.

    Without a sampled trace it keeps nothing; `attempt` and `item` are the server span's context then, so that
    workers do not begin traces of their own.
    """

    def __init__(self, server: ServerSpan, request_id: str, choice: int) -> None:
        self._server = server
        self._names: dict[str, Value] = {names.REQUEST_ID: request_id}
        if choice:
            self._names[names.CHOICE] = choice
        self._look_up: float | None = None
        self._items: dict[str, Span] = {}
        self._attempt: _OpenAttempt | None = None
        self._cached_tokens = 0

    @property
    def recording(self) -> bool:
        return self._server.recording

    @property
    def trace_id(self) -> str:
        """For logs."""
        return hex_trace_id(self._server.context)

    @property
    def attempt(self) -> SpanContext:
        """The context that goes to the PD worker."""
        return self._server.context if self._attempt is None else self._attempt.span.get_span_context()

    def item(self, mm_hash: str) -> SpanContext:
        """The context that goes to the encoder worker."""
        span = self._items.get(mm_hash)
        return self._server.context if span is None else span.get_span_context()

    def fetched(self, start: float, seconds: float, items: int) -> None:
        """The call's media are fetched, split and hashed."""
        self._server.tracer.stage("fetch", self._server.context, start, seconds, {names.ITEMS: items})

    def observe(self, order: Instruction, now: float, address: str, origins: dict[str, str]) -> None:
        """One instruction of the state machine, before it is carried out.

        `address` is that of the attempt's PD worker, `origins` say where the items' embeddings come from.
        """
        if not self._server.recording:
            return
        match order:
            case LookUpItems():
                self._look_up = now
            case StartJobs():
                self._end_look_up(now)
                for mm_hash in order.mm_hashes:
                    self._begin_item(mm_hash, now, re_encode=order.re_encode)
            case Submit():
                self._end_look_up(now)
                self._end_attempt("worker_lost")
                attributes = {**self._names, names.ATTEMPT: order.attempt}
                self._attempt = _OpenAttempt(self._begin("PD attempt", now, attributes), now)
            case EndAttempt():
                self._leave_attempt(order, now, address)
            case Emit(output=Started()):
                self._note("admitted", now)
            case Emit(output=Done() as done):
                self._finished(done)
            case Fail():
                self._end_attempt(order.error.code)
                for mm_hash in list(self._items):
                    self._end_item(mm_hash, now, origins.get(mm_hash, ""), order.error.code)

    def accepted(self, now: float) -> None:
        """A PD worker has taken the request: until then it has waited in the proxy."""
        attempt = self._attempt
        if attempt is not None and not attempt.accepted:
            attempt.accepted = True
            self._server.tracer.stage("queue", self.attempt, attempt.start, now - attempt.start)
            self._note("accepted", now)

    def item_ready(self, mm_hash: str, end: JobReady, origin: str, now: float) -> None:
        """An encoder job has ended with the embedding in the store."""
        if span := self._items.get(mm_hash):
            span.set_attributes(
                {
                    names.MODALITY: end.plan.modality,
                    names.ROWS: end.plan.rows,
                    names.BYTES: end.plan.nbytes,
                    names.STORED: end.already_stored,
                }
            )
            self._end_item(mm_hash, now, origin, "")

    def end(self, now: float, origins: dict[str, str]) -> None:
        """The request has ended in any way: what is still open was cancelled."""
        self._end_look_up(now)
        self._end_attempt("cancelled")
        for mm_hash in list(self._items):
            self._end_item(mm_hash, now, origins.get(mm_hash, ""), "cancelled")

    def call_ended(self, prompt_tokens: int, completion_tokens: int, first_token: float | None) -> None:
        """The whole call has ended: its tokens, and when its first one came."""
        self._server.count(prompt_tokens, self._cached_tokens, completion_tokens)
        if first_token is not None:
            self._server.first_token(first_token)

    def client_closed(self) -> None:
        """The client has left before its answer's end."""
        self._server.broken("client_closed")

    def _begin_item(self, mm_hash: str, now: float, *, re_encode: bool) -> None:
        attributes = {**self._names, **names.item(mm_hash), names.RE_ENCODE: re_encode}
        self._items[mm_hash] = self._begin("encode item", now, attributes)

    def _end_item(self, mm_hash: str, now: float, origin: str, error: str) -> None:
        span = self._items.pop(mm_hash)
        span.set_attribute(names.SOURCE, origin)
        self._finish(span, now, error)

    def _end_look_up(self, now: float) -> None:
        start, self._look_up = self._look_up, None
        if start is not None:
            self._server.tracer.stage("look up", self._server.context, start, now - start, self._names)

    def _leave_attempt(self, order: EndAttempt, now: float, address: str) -> None:
        """What comes next says how it ended; where no encoder worker is there, nothing comes for a while."""
        if self._attempt is not None:
            self._attempt.end = now
            self._attempt.span.set_attributes(names.server(address))
            if order.now:
                self._end_attempt("no_encoder_worker")

    def _finished(self, done: Done) -> None:
        self._server.finished(done.reason.value)
        self._cached_tokens = done.usage.cached_tokens
        if self._attempt is not None:
            self._attempt.span.set_attribute(names.FINISH_REASONS, (done.reason.value,))
        self._end_attempt("")

    def _end_attempt(self, error: str) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            self._finish(attempt.span, attempt.end, error)

    def _note(self, name: str, now: float) -> None:
        if self._attempt is not None:
            self._server.tracer.note(self._attempt.span, name, now)

    def _begin(self, name: str, now: float, attributes: dict[str, Value]) -> Span:
        return self._server.tracer.start(name, self._server.context, attributes, kind=SpanKind.CLIENT, at=now)

    def _finish(self, span: Span, end: float | None, error: str) -> None:
        if error:
            span.set_attribute(names.ERROR_TYPE, error)
        self._server.tracer.end(span, end, error)

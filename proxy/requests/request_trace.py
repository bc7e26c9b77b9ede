"""Spans of one request in the proxy, made from the instructions and events of its state machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from triptych.base.tracing import attributes as names
from triptych.base.tracing.attributes import Value
from triptych.base.tracing.context import SpanContext, hex_trace_id
from triptych.base.tracing.server_span import ServerSpan
from triptych.base.tracing.tracer import Span, SpanKind
from triptych.proxy.call.chat import Done, Started
from triptych.proxy.ports import JobReady
from triptych.proxy.requests.events import Accepted, CallEnded, Ended, Event, Fetched, ItemReady
from triptych.proxy.requests.instructions import Emit, EndAttempt, Fail, LookUpItems, StartJobs, Submit


@dataclass(slots=True)
class _OpenAttempt:
    """An attempt that has not ended. `end` is set before its span ends where that waits for its outcome."""

    span: Span
    start: float
    number: int
    accepted: bool = False
    end: float | None = None


class RequestTrace:
    """The spans of one choice under the server span of its call. A `RequestView` where the trace is sampled.

    Without a sampled trace it gets no events; `attempt` and `item` are the server span's context then, so
    that workers do not begin traces of their own.
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

    def observe(self, event: Event, at: float, address: str, origins: Mapping[str, str]) -> None:
        """Begins and ends spans by the event."""
        match event:
            case Fetched(mm_hashes=items, seconds=seconds):
                if items:
                    count: dict[str, Value] = {names.ITEMS: len(items)}
                    self._server.tracer.stage("fetch", self._server.context, at - seconds, seconds, count)
            case Submit():
                self._end_look_up(at)
                self._end_attempt("worker_lost")
                attributes = {**self._names, names.ATTEMPT: event.attempt}
                self._attempt = _OpenAttempt(self._begin("PD attempt", at, attributes), at, event.attempt)
            case Accepted():
                self._accepted(event.attempt, at)
            case EndAttempt():
                self._leave_attempt(event, at, address)
            case Emit(output=Started()):
                self._note("admitted", at)
            case Emit(output=Done() as done):
                self._finished(done)
            case Fail():
                self._end_all(at, origins, event.error.code)
            case Ended():
                self._end_look_up(at)
                self._end_all(at, origins, "cancelled")
            case CallEnded():
                self._call_ended(event)
            case _:
                self._observe_items(event, at, origins)

    def _observe_items(self, event: Event, at: float, origins: Mapping[str, str]) -> None:
        match event:
            case LookUpItems():
                self._look_up = at
            case StartJobs():
                self._end_look_up(at)
                for mm_hash in event.mm_hashes:
                    self._begin_item(mm_hash, at, re_encode=event.re_encode)
            case ItemReady():
                self._item_ready(event.mm_hash, event.end, origins.get(event.mm_hash, "encoded"), at)

    def _accepted(self, number: int, now: float) -> None:
        """A PD worker has taken the request: until then it has waited in the proxy."""
        attempt = self._attempt
        if attempt is not None and attempt.number == number and not attempt.accepted:
            attempt.accepted = True
            self._server.tracer.stage("queue", self.attempt, attempt.start, now - attempt.start)
            self._note("accepted", now)

    def _item_ready(self, mm_hash: str, end: JobReady, origin: str, now: float) -> None:
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

    def _end_all(self, now: float, origins: Mapping[str, str], error: str) -> None:
        """Ends what is still open with this error."""
        self._end_attempt(error)
        for mm_hash in list(self._items):
            self._end_item(mm_hash, now, origins.get(mm_hash, ""), error)

    def _call_ended(self, call: CallEnded) -> None:
        self._server.count(call.prompt_tokens, self._cached_tokens, call.completion_tokens)
        if call.first_token is not None:
            self._server.first_token(call.first_token)
        if call.status == 499:
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

"""Recorder of requests, their only observer; who wants to see more of them subscribes to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from triptych.base.errors import RequestError
from triptych.base.metrics import ProxyMetrics
from triptych.base.tracing import attributes as names
from triptych.base.tracing.attributes import Value, sampling
from triptych.base.tracing.context import SpanContext, hex_trace_id
from triptych.base.tracing.server_span import ServerSpan
from triptych.base.tracing.tracer import Span, SpanKind
from triptych.protos.convert import plan_nbytes
from triptych.protos.encoder_pb2 import ItemReady
from triptych.protos.pd_pb2 import Admitted
from triptych.proxy import events
from triptych.proxy.call.chat import Done
from triptych.proxy.events import CallEnded, Ended, JobEvent, RequestEvent
from triptych.proxy.requests import instructions as do
from triptych.proxy.requests.instructions import Instruction, Submit
from triptych.proxy.requests.request_item import RequestItem

if TYPE_CHECKING:
    from triptych.proxy.requests.request import Choices, InFlightRequest

_ENDED = Ended()


class CallObserver(Protocol):
    """Whatever watches the calls of one proxy."""

    def opened(self, choices: Choices) -> RequestView:
        """A call is admitted; the view gets the events of its first choice."""

    def closed(self, choices: Choices, failure: RequestError | None) -> None:
        """A call has ended; `failure`: with this error."""

    def encoded(self, end: JobEvent) -> None:
        """An encoder job has ended with its item in the store."""


class Recorder:
    """The recorder of one proxy. `clock` is the proxy's."""

    def __init__(
        self,
        metrics: ProxyMetrics,
        clock: Callable[[], float],
        model_name: Callable[[str], str],
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._model_name = model_name
        self._subscribers: tuple[CallObserver, ...] = ()

    def subscribe(self, observer: CallObserver) -> None:
        """Tells it of all calls that are admitted from now on."""
        self._subscribers += (observer,)

    def open(self, choices: Choices, span: ServerSpan | None) -> None:
        """A call is admitted; `span`: its requests are traced under this one."""
        first = choices.first
        if span is not None:
            for index, request in enumerate(choices.requests):
                request.trace = RequestTrace(span, request.request_id, index)
                if span.recording:
                    request.views = (request.trace,)
            if span.recording:
                model = self._model_name(first.call.served_name)
                span.serves(model, sampling(first.call.sampling, len(choices.requests)))
        for observer in self._subscribers:
            first.views = (*first.views, observer.opened(choices))

    def record(
        self, request: InFlightRequest, event: Event, instructions: Sequence[Instruction] = ()
    ) -> None:
        """One event of a request, now, and what its state machine has decided, before that is done."""
        for order in instructions:
            if type(order) is Submit and order.attempt > 1:
                self._metrics.resumes.labels("resume" if order.resumes else "resubmit").inc()
            elif result := _hand_over_result(order):
                self._metrics.hand_overs.labels(result).inc()
        if views := request.views:
            now, address, link = self._clock(), request.pd_address, request.successor_link
            for view in views:
                for each in (event, *instructions):
                    where = link.address if link is not None and type(each) is do.TakeOver else address
                    view.observe(each, now, where, request.lifecycle.items)

    def encoded(self, end: JobEvent) -> None:
        """An encoder job has ended with its item in the store."""
        for observer in self._subscribers:
            observer.encoded(end)

    def close(self, choices: Choices, failure: RequestError | None) -> None:
        """A call has ended; `failure`: with this error."""
        for request in choices.requests:
            self.record(request, _ENDED)
        if choices.first.trace is not None:  # no other view shows it
            tokens = choices.prompt_tokens, choices.completion_tokens
            self.record(choices.first, CallEnded(choices.status, *tokens, choices.first_token))
        choices.report(self._metrics, self._clock(), self._model_name(choices.first.call.served_name))
        for observer in self._subscribers:
            observer.closed(choices, failure)


def _hand_over_result(order: Instruction) -> str:
    """The label of an instruction about a hand-over; "" of any other one."""
    match order:
        case do.TakeOver(lost=after_loss):
            return "after_loss" if after_loss else "taken"
        case do.HandOver(behind=True):
            return "behind"
        case do.KeepAttempt():
            return "kept"
    return ""


Event = Instruction | RequestEvent | events.Ended | events.CallEnded
Items = Mapping[str, RequestItem]


class RequestView(Protocol):
    """A view of one request. It sees an event after the state machine, an instruction before it is done."""

    def observe(self, event: Event, at: float, address: str, items: Items) -> None:
        """`at` is a moment of the proxy's clock, `address` that of the attempt's PD worker, of one that takes
        over the new one's, `items` are the
        request's."""


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

    def item(self, item: RequestItem) -> SpanContext:
        """The context that goes to the encoder worker."""
        return self._server.context if item.span is None else item.span.get_span_context()

    def observe(self, event: Event, at: float, address: str, items: Items) -> None:
        """Begins and ends spans by the event."""
        match event:
            case events.Fetched(params=params, seconds=seconds):
                if params and names.CHOICE not in self._names:
                    count: dict[str, Value] = {names.ITEMS: len(params)}
                    self._server.tracer.stage("fetch", self._server.context, at - seconds, seconds, count)
            case do.Submit():
                self._end_look_up(at)
                self._end_attempt("worker_lost")
                attributes = {**self._names, names.ATTEMPT: event.attempt}
                self._attempt = _OpenAttempt(self._begin("PD attempt", at, attributes), at, event.attempt)
            case events.Accepted():
                self._accepted(event.attempt, at)
            case do.TakeOver():
                self._end_attempt("worker_lost" if event.lost else "")
                attributes = {**self._names, **names.server(address), names.ATTEMPT: event.attempt}
                span = self._begin("PD attempt", at, attributes)
                self._attempt = _OpenAttempt(span, at, event.attempt, accepted=True)
            case do.EndAttempt():
                self._leave_attempt(event, at, address)
            case do.Emit(output=Admitted()):
                self._note("admitted", at)
            case do.Emit(output=Done() as done):
                self._finished(done)
            case do.Fail():
                self._end_all(at, items, event.error.code)
            case events.Ended():
                self._end_look_up(at)
                self._end_all(at, items, "cancelled")
            case events.CallEnded():
                self._call_ended(event)
            case _:
                self._observe_items(event, at, items)

    def _observe_items(self, event: Event, at: float, items: Items) -> None:
        match event:
            case do.LookUpItems():
                self._look_up = at
            case do.StartJobs():
                self._end_look_up(at)
                for mm_hash in event.mm_hashes:
                    self._begin_item(items[mm_hash], at, re_encode=event.re_encode)
            case events.JobEvent() if event.HasField("ready"):
                self._item_ready(items[event.mm_hash], event.ready, at)

    def _accepted(self, number: int, now: float) -> None:
        """A PD worker has taken the request: until then it has waited in the proxy."""
        attempt = self._attempt
        if attempt is not None and attempt.number == number and not attempt.accepted:
            attempt.accepted = True
            self._server.tracer.stage("queue", self.attempt, attempt.start, now - attempt.start)
            self._note("accepted", now)

    def _item_ready(self, item: RequestItem, end: ItemReady, now: float) -> None:
        if item.span is not None:
            item.span.set_attributes(
                {
                    names.MODALITY: end.plan.modality,
                    names.ROWS: end.plan.rows,
                    names.BYTES: plan_nbytes(end.plan),
                    names.STORED: end.already_stored,
                }
            )
            self._end_item(item, now, "store" if end.already_stored else item.origin or "encoded", "")

    def _end_all(self, now: float, items: Items, error: str) -> None:
        """Ends what is still open with this error."""
        self._end_attempt(error)
        for item in items.values():
            self._end_item(item, now, item.origin, error)

    def _call_ended(self, call: CallEnded) -> None:
        self._server.count(call.prompt_tokens, self._cached_tokens, call.completion_tokens)
        if call.first_token is not None:
            self._server.first_token(call.first_token)
        if call.status == 499:
            self._server.broken("client_closed")

    def _begin_item(self, item: RequestItem, now: float, *, re_encode: bool) -> None:
        attributes = {**self._names, **names.item(item.mm_hash), names.RE_ENCODE: re_encode}
        item.span = self._begin("encode item", now, attributes)

    def _end_item(self, item: RequestItem, now: float, origin: str, error: str) -> None:
        span, item.span = item.span, None
        if span is not None:
            span.set_attribute(names.SOURCE, origin)
            self._finish(span, now, error)

    def _end_look_up(self, now: float) -> None:
        start, self._look_up = self._look_up, None
        if start is not None:
            self._server.tracer.stage("look up", self._server.context, start, now - start, self._names)

    def _leave_attempt(self, order: do.EndAttempt, now: float, address: str) -> None:
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

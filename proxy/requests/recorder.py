"""Recorder of requests, their only observer, and its views: the timeline and the spans of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

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
from triptych.proxy.events import CallEnded, Ended, JobEvent, RequestEvent, told
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
        calls: CallObserver | None = None,
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._model_name = model_name
        self._calls = calls

    def open(self, choices: Choices, span: ServerSpan | None) -> None:
        """A call is admitted; `span`: its requests are traced under this one."""
        first = choices.first
        if span is not None:
            for index, request in enumerate(choices.requests):
                request.trace = RequestTrace(span, request.request_id, index)
                if span.recording:
                    request.views = (request.trace,)
            if span.recording:
                model = self._model_name(first.call.model)
                span.serves(model, sampling(first.call.sampling, len(choices.requests)))
        if self._calls is not None:
            first.views = (*first.views, self._calls.opened(choices))

    def record(
        self, request: InFlightRequest, event: Event, instructions: Sequence[Instruction] = ()
    ) -> None:
        """One event of a request, now, and what its state machine has decided, before that is done."""
        for order in instructions:
            if type(order) is Submit and order.attempt > 1:
                self._metrics.resumes.labels("resume" if order.resumes else "resubmit").inc()
        if views := request.views:
            now, address = self._clock(), request.pd_address
            for view in views:
                for each in (event, *instructions):
                    view.observe(each, now, address, request.lifecycle.items)

    def encoded(self, end: JobEvent) -> None:
        """An encoder job has ended with its item in the store."""
        if self._calls is not None:
            self._calls.encoded(end)

    def close(self, choices: Choices, failure: RequestError | None) -> None:
        """A call has ended; `failure`: with this error."""
        for request in choices.requests:
            self.record(request, _ENDED)
        if choices.first.trace is not None:  # no other view shows it
            tokens = choices.prompt_tokens, choices.completion_tokens
            self.record(choices.first, CallEnded(choices.status, *tokens, choices.first_token))
        choices.report(self._metrics, self._clock())
        if self._calls is not None:
            self._calls.closed(choices, failure)


Event = Instruction | RequestEvent | events.Ended | events.CallEnded
Items = Mapping[str, RequestItem]
#: What a moment is of: the type of an event or instruction, or the alternative of a worker's message.
Kind = type[Event] | str


class RequestView(Protocol):
    """A view of one request. It sees an event after the state machine, an instruction before it is done."""

    def observe(self, event: Event, at: float, address: str, items: Items) -> None:
        """`at` is a moment of the proxy's clock, `address` that of the attempt's PD worker, `items` are the
        request's."""


#: Items whose moments are kept one by one; those of further ones are summed.
TIMED_ITEMS = 16
#: Moments of one request; later ones are dropped.
MAX_MOMENTS = 192
#: Characters of a note.
_NOTE = 120

Seconds = tuple[float, ...]


class Moment(NamedTuple):
    """One event. `item` is its place among the request's distinct items; None: it is of the whole request.

    An item's `note` says why a try has failed, that its job is another request's ("joined"), that
    it is encoded "again", or that the tower did not run ("stored"). `spent` are the seconds of the fetch, the
    load, of preprocessing, tower and save, or of prefill and decode.
    """

    at: float
    kind: Kind
    attempt: int = 0
    item: int | None = None
    where: str = ""
    note: str = ""
    spent: Seconds = ()


_FIELDS = len(Moment._fields)
_MAX_VALUES = MAX_MOMENTS * _FIELDS
#: Events of items.
_ITEMS = {
    events.LookedUp,
    do.StartJobs,
    events.JobEvent,
    do.TellJobs,
}
_SHOWN = _ITEMS | {
    events.Fetched,
    do.Submit,
    events.Accepted,
    events.WorkerEvent,
    events.FirstToken,
    do.EndAttempt,
}


class RequestTimeline:
    """The moments of one request in order, for its waterfall; bounded. No token adds one. A `RequestView`."""

    __slots__ = (
        "_keys", "_on_load", "_values", "attempt", "cached_tokens", "items", "loaded", "rest", "titles",
    )  # fmt: skip

    def __init__(self, on_load: Callable[[str, int], None] = lambda way, nbytes: None) -> None:
        #: Called for each embedding that a PD worker has loaded, with its way and bytes.
        self._on_load = on_load
        #: Of the items whose moments are kept one by one.
        self._keys: tuple[str, ...] = ()
        #: Of the same items.
        self.titles: tuple[str, ...] = ()
        #: The fields of all moments one after another: most timelines are never read, and a tuple for each
        #: moment would cost every request its making, and the garbage collector its visits.
        self._values: list[Any] = []
        #: Distinct items.
        self.items = 0
        #: The first and the last moment of items that are not kept one by one.
        self.rest: tuple[float, float] | None = None
        self.attempt = 0
        #: Items that the attempt's PD worker has.
        self.loaded = 0
        self.cached_tokens = 0

    @property
    def moments(self) -> list[Moment]:
        """The moments, in order."""
        values = self._values
        return [Moment(*values[first : first + _FIELDS]) for first in range(0, len(values), _FIELDS)]

    def observe(self, event: Event, at: float, address: str, items: Items) -> None:
        """Notes what a waterfall shows of the event; one of an attempt that is over is ignored."""
        kind: Kind = type(event)
        if kind not in _SHOWN or (isinstance(event, events.AttemptEvent) and event.attempt != self.attempt):
            return
        spent: Seconds = ()
        match event:
            case do.Submit():
                self.attempt, self.loaded = event.attempt, 0
            case events.Fetched():
                self.items = len(event.params)
                self._keys, self.titles = tuple(event.params)[:TIMED_ITEMS], event.titles[:TIMED_ITEMS]
                spent = (event.seconds,)
            case events.WorkerEvent():
                self._observe_worker(event, at, address, items)
                return
            case _ if kind in _ITEMS:
                self._observe_item(event, at, address)
                return
        self._note(at, kind, None, address, "", spent)

    def _observe_worker(self, event: events.WorkerEvent, at: float, address: str, items: Items) -> None:
        match kind := told(event):
            case "admitted":
                self._note(at, kind, None, address, "", ())
            case "finished" if events.served(event):
                end = event.finished
                self.cached_tokens = end.cached_tokens
                self._note(at, kind, None, address, "", (end.prefill_seconds, end.decode_seconds))
            case "item_loaded":
                load, item = event.item_loaded, items.get(event.item_loaded.mm_hash)
                if item is not None and item.expected:
                    return  # TellJobs follows, the first time
                self.loaded += 1
                self._note_item(at, kind, load.mm_hash, address, load.path[:_NOTE], (load.seconds,))
                if load.seconds > 0:
                    plan = None if item is None else item.plan
                    self._on_load(load.path or "store", 0 if plan is None else plan_nbytes(plan))
            case "item_missing":
                self._note_item(at, kind, event.item_missing.mm_hash, address)

    def _observe_item(self, event: Event, at: float, address: str) -> None:
        kind = type(event)
        match event:
            case events.LookedUp():
                self._note(at, kind, None, "", "", ())
                for key in event.plans:
                    self._note_item(at, kind, key)
            case do.StartJobs(re_encode=True):
                for key in event.mm_hashes:
                    self._note_item(at, kind, key, note="again")
            case events.JobEvent():
                self._observe_job(event, at)
            case do.TellJobs(held=True):
                self.loaded += 1
                self._note_item(at, kind, event.event.item_loaded.mm_hash, address)

    def _observe_job(self, job: events.JobEvent, at: float) -> None:
        match kind := job.kind:
            case "waits":
                self._note_item(at, kind, job.mm_hash, note=job.origin)
            case "planned":
                self._note_item(at, kind, job.mm_hash, job.address)
            case "failed" if job.event.failed.retryable:
                self._note_item(at, kind, job.mm_hash, job.address, job.event.failed.error.message[:_NOTE])
            case "ready":
                end = job.event.ready
                spent = (end.preprocess_seconds, end.encode_seconds, end.save_seconds)
                note = "stored" if end.already_stored else ""
                self._note_item(at, kind, job.mm_hash, job.address, note, spent)

    def _note_item(
        self, at: float, kind: Kind, key: str, where: str = "", note: str = "", spent: Seconds = ()
    ) -> None:
        if key in self._keys:
            self._note(at, kind, self._keys.index(key), where, note, spent)
        else:
            self.rest = (self.rest[0] if self.rest else at, at)

    def _note(self, at: float, kind: Kind, item: int | None, where: str, note: str, spent: Seconds) -> None:
        if len(self._values) < _MAX_VALUES:
            self._values += (at, kind, self.attempt, item, where, note, spent)


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
            case events.JobEvent(kind="ready"):
                self._item_ready(items[event.mm_hash], event.event.ready, at)

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

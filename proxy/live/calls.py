"""Calls of one proxy, in flight and the last ones that have ended: the `CallObserver` of the dispatcher."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

import msgspec

from triptych.base.errors import RequestError
from triptych.proxy.events import JobReady
from triptych.proxy.live.failures import FailureLog
from triptych.proxy.live.objects import RequestRow, draw_row, short_address
from triptych.proxy.live.statistics import EncoderTallies, GoodputWindow
from triptych.proxy.requests.lifecycle import Lifecycle, Phase
from triptych.proxy.requests.request import Choices, InFlightRequest
from triptych.proxy.requests.views import RequestTimeline

#: Calls that have ended whose records are kept.
MAX_RECORDS = 256
#: Calls in flight that a snapshot shows.
MAX_ROWS = 64
#: A client's 4xx, and a client that has left, say nothing of the cluster.
_SERVER_ERROR = 500
_OK = 200


class CallRecord(msgspec.Struct, frozen=True):
    """What the waterfall of a call is made from, in flight and afterwards; nothing of the call's content.

    `row` names it to everybody, and is empty until a snapshot has shown it; `label` names it to its tenant
    alone. `started` and `ended` are moments of the proxy's clock, `started_at` is the time of day; without
    `ended` and `status` it is in flight.
    """

    row: str
    label: str
    tenant: str
    model: str
    started_at: float
    started: float
    timeline: RequestTimeline
    choices: int
    prompt_tokens: int
    completion_tokens: int
    ended: float | None = None
    status: int | None = None


class CallLog:
    """The log of calls; a call costs constant work at its beginning and end.

    `clock` is the dispatcher's, `wall` the time of day.

    Every call pays for it, whether anybody reads it or not: what only a reader needs is made for the reader.
    """

    def __init__(
        self,
        goodput: GoodputWindow,
        failures: FailureLog,
        model_name: Callable[[str], str] = lambda name: name,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.goodput = goodput
        self.failures = failures
        self._model_name = model_name
        self._clock = clock
        self._wall = wall
        #: By order of arrival.
        self._open: dict[int, tuple[Choices, RequestTimeline]] = {}
        #: Of those by tenant, and label or row: the newest of equal labels.
        self._names: dict[tuple[str, str], int] = {}
        #: Names of the calls that a snapshot has shown.
        self._rows: dict[int, str] = {}
        self._ended: OrderedDict[int, CallRecord] = OrderedDict()
        self.tallies = EncoderTallies()

    def opened(self, choices: Choices) -> RequestTimeline:
        first, timeline = choices.first, RequestTimeline()
        self._open[first.order] = choices, timeline
        self._names[first.call.tenant, first.call.label] = first.order
        return timeline

    def encoded(self, end: JobReady) -> None:
        self.tallies.add(end)

    def closed(self, choices: Choices, failure: RequestError | None) -> None:
        order, now = choices.first.order, self._clock()
        self._ended[order] = self._record(order, *self._open.pop(order), now)
        if len(self._ended) > MAX_RECORDS:
            self._forget(*self._ended.popitem(last=False))
        if choices.status == _OK and not choices.first.call.internal:
            ttft = (now if choices.first_token is None else choices.first_token) - choices.started
            longest = max(len(request.lifecycle.output_token_ids) for request in choices.requests)
            self.goodput.answered(now, ttft, now - choices.started, longest)
        elif choices.status >= _SERVER_ERROR:
            self.goodput.failed()
            if failure is not None:
                self.failures.add_request(self._wall(), failure)

    def _forget(self, order: int, record: CallRecord) -> None:
        self._rows.pop(order, None)
        for name in (record.label, record.row):
            if self._names.get((record.tenant, name)) == order:
                del self._names[record.tenant, name]

    def find(self, tenant: str, name: str) -> CallRecord | None:
        """The tenant's own call of that label or row, the newest one; None for any other's."""
        order = self._names.get((tenant, name))
        if order is None:
            return None
        known = self._open.get(order)
        return self._ended.get(order) if known is None else self._record(order, *known)

    def find_any(self, name: str) -> CallRecord | None:
        """The newest call of that label or row, whoever's it is: for operators."""
        named = ((order, tenant) for (tenant, known), order in self._names.items() if known == name)
        newest = max(named, default=None)
        return None if newest is None else self.find(newest[1], name)

    def rows(self, tenant: str = "") -> list[RequestRow]:
        """The newest calls in flight, newest first: the tenant's, or of all where it is empty."""
        now, newest = self._clock(), reversed(self._open.values())
        own = (known for known in newest if not tenant or known[0].first.call.tenant == tenant)
        return [self._row(*known, now) for known in islice(own, MAX_ROWS)]

    def _record(
        self, order: int, choices: Choices, timeline: RequestTimeline, ended: float | None = None
    ) -> CallRecord:
        call = choices.first.call
        return CallRecord(
            row=self._rows.get(order, ""),
            label=call.label,
            tenant=call.tenant,
            model=self._model_name(call.model),
            started_at=self._wall() - (self._clock() - choices.started),
            started=choices.started,
            timeline=timeline,
            choices=len(choices.requests),
            prompt_tokens=choices.prompt_tokens,
            completion_tokens=choices.completion_tokens,
            ended=ended,
            status=None if ended is None else choices.status,
        )

    def _row_name(self, first: InFlightRequest) -> str:
        """A name that a snapshot may show, drawn when one first does."""
        row = self._rows.get(first.order)
        if row is None:
            row = self._rows[first.order] = draw_row()
            self._names[first.call.tenant, row] = first.order
        return row

    def _row(self, choices: Choices, timeline: RequestTimeline, now: float) -> RequestRow:
        first, machine = choices.first, choices.first.lifecycle
        return RequestRow(
            id=self._row_name(first),
            model=self._model_name(first.call.model),
            age=round(now - choices.started, 3),
            stage=stage_of(machine, timeline),
            items=timeline.items,
            items_ready=machine.items_ready,
            tokens=choices.completion_tokens,
            pd_worker=short_address(first.pd_address),
            attempt=machine.attempt,
        )


def stage_of(machine: Lifecycle, timeline: RequestTimeline) -> str:
    """The stage that a request is in: fetch, queue, encode, load, prefill or decode."""
    if machine.phase in (Phase.NEW, Phase.LOOK_UP):
        return "fetch"
    if machine.phase in (Phase.PLAN, Phase.WAIT):
        return "encode"
    if machine.output_token_ids or machine.ended:
        return "decode"
    if machine.phase is Phase.SUBMIT or machine.prompt_token_ids is None:
        return "queue"
    if machine.items_ready < timeline.items:
        return "encode"
    return "load" if timeline.loaded < timeline.items else "prefill"

"""Calls of one proxy, in flight and the last that ended, with the records behind their waterfalls."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain, islice

import msgspec

from triptych.base.errors import RequestError
from triptych.protos.convert import plan_nbytes
from triptych.proxy.events import Accepted, JobEvent
from triptych.proxy.live.failures import FailureLog
from triptych.proxy.live.objects import (
    FinishedQuery,
    FinishedRequests,
    FinishedRow,
    RequestRow,
    draw_row,
    short_address,
)
from triptych.proxy.live.statistics import EncoderTallies, GoodputWindow, Transfers
from triptych.proxy.live.timeline import RequestTimeline
from triptych.proxy.requests.lifecycle import Lifecycle, Phase
from triptych.proxy.requests.request import Choices

#: Calls in flight that a snapshot shows.
MAX_ROWS = 64
#: A client's 4xx, and a client that has left, say nothing of the cluster.
_SERVER_ERROR = 500
_OK = 200


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
        worker_name: Callable[[str], str] = short_address,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.goodput = goodput
        self.failures = failures
        self._model_name = model_name
        self._worker_name = worker_name
        self._clock = clock
        self._wall = wall
        #: By order of arrival.
        self._open: dict[int, tuple[Choices, RequestTimeline]] = {}
        #: Open and kept ones by tenant, and label or row: the newest of equal labels.
        self._names: dict[tuple[str, str], int] = {}
        #: Names of the calls that somebody has seen a row of.
        self._rows: dict[int, str] = {}
        self._ended = CallRecords()
        self.transfers = Transfers()
        self.tallies = EncoderTallies()

    def opened(self, choices: Choices) -> RequestTimeline:
        first, timeline = choices.first, RequestTimeline(self.transfers.add)
        self._open[first.order] = choices, timeline
        self._names[first.call.tenant, first.call.label] = first.order
        return timeline

    def encoded(self, end: JobEvent) -> None:
        ready = end.ready
        self.tallies.add(end.address, ready)
        if not ready.already_stored:
            self.transfers.add("encoded", plan_nbytes(ready.plan))

    def closed(self, choices: Choices, failure: RequestError | None) -> None:
        order, now = choices.first.order, self._clock()
        record = self._record(*self._open.pop(order), now)
        # The proxy's own question for another call is no request.
        gone = (order, record) if choices.first.call.internal else self._ended.add(order, record)
        if gone is not None:
            self._forget(*gone)
        if choices.status == _OK and not choices.first.call.internal:
            ttft = (now if choices.first_token is None else choices.first_token) - choices.started
            longest = max(len(request.lifecycle.output_token_ids) for request in choices.requests)
            self.goodput.answered(now, ttft, now - choices.started, longest)
        elif choices.status >= _SERVER_ERROR:
            self.goodput.failed()
            if failure is not None:
                self.failures.add_request(self._wall(), failure)

    def _forget(self, order: int, record: CallRecord) -> None:
        for name in (record.label, self._rows.pop(order, "")):
            if self._names.get((record.tenant, name)) == order:
                del self._names[record.tenant, name]

    def find(self, tenant: str, name: str) -> CallRecord | None:
        """The tenant's own call of that label or row, the newest one; None for any other's."""
        order = self._names.get((tenant, name))
        if order is None:
            return None
        known = self._open.get(order)
        return self._ended.get(order) if known is None else self._record(*known)

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

    def finished(self, tenant: str, query: FinishedQuery) -> FinishedRequests:
        """Kept calls that have ended: the tenant's, or of all where it is empty."""
        own = [each for each in self._ended.all() if not tenant or each[1].tenant == tenant]
        models = sorted({record.model for _, record in own})
        if query.failed:
            own = [each for each in own if each[1].failed]
        if query.model:
            own = [each for each in own if each[1].model == query.model]
        slowest = query.order == "slowest"
        own.sort(key=lambda each: each[1].seconds if slowest else each[1].ended or 0.0, reverse=True)
        return FinishedRequests([self._finished_row(*each) for each in own[: query.limit]], models)

    def _finished_row(self, number: int, record: CallRecord) -> FinishedRow:
        ttft = None if record.first_token is None else round(record.first_token - record.started, 6)
        return FinishedRow(
            id=self._row_name(number, record.tenant),
            model=record.model,
            ended=round(record.started_at + record.seconds, 3),
            seconds=round(record.seconds, 6),
            ttft=ttft,
            status=record.status or 0,
            items=record.timeline.items,
            tokens=record.completion_tokens,
            pd_worker=self._worker_name(record.pd_address),
            media_tokens=record.media_tokens,
        )

    def _record(self, choices: Choices, timeline: RequestTimeline, ended: float | None = None) -> CallRecord:
        call = choices.first.call
        return CallRecord(
            label=call.label,
            tenant=call.tenant,
            model=self._model_name(call.served_name),
            started_at=self._wall() - (self._clock() - choices.started),
            started=choices.started,
            timeline=timeline,
            choices=len(choices.requests),
            prompt_tokens=choices.prompt_tokens,
            completion_tokens=choices.completion_tokens,
            first_token=choices.first_token,
            ended=ended,
            status=None if ended is None else choices.status,
            media_tokens=choices.first.lifecycle.media_tokens,
        )

    def _row_name(self, order: int, tenant: str) -> str:
        """A name that a row may show, drawn when one first does."""
        row = self._rows.get(order)
        if row is None:
            row = self._rows[order] = draw_row()
            self._names[tenant, row] = order
        return row

    def _row(self, choices: Choices, timeline: RequestTimeline, now: float) -> RequestRow:
        first, machine = choices.first, choices.first.lifecycle
        return RequestRow(
            id=self._row_name(first.order, first.call.tenant),
            model=self._model_name(first.call.served_name),
            age=round(now - choices.started, 3),
            stage=stage_of(machine, timeline),
            items=timeline.items,
            items_ready=machine.items_ready,
            tokens=choices.completion_tokens,
            pd_worker=self._worker_name(first.pd_address),
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


#: Calls that are kept: the newest, and of older ones those that failed and the slowest, for these seconds.
MAX_NEWEST, MAX_KEPT, KEEP_SECONDS = 256, 128, 600.0
_ERROR = 400


class CallRecord(msgspec.Struct, frozen=True):
    """What the waterfall of a call is made from, in flight and afterwards; nothing of the call's content.

    `label` names it to its tenant alone. `started`, `first_token` and `ended` are moments of the proxy's
    clock, `started_at` is the time of day; without `ended` and `status` it is in flight.
    """

    label: str
    tenant: str
    model: str
    started_at: float
    started: float
    timeline: RequestTimeline
    choices: int
    prompt_tokens: int
    completion_tokens: int
    first_token: float | None = None
    ended: float | None = None
    status: int | None = None
    media_tokens: int = 0

    @property
    def seconds(self) -> float:
        """The time from arrival to end; 0 in flight."""
        return 0.0 if self.ended is None else self.ended - self.started

    @property
    def pd_address(self) -> str:
        """The last PD worker that had it; empty where none did."""
        taken = (Accepted, "admitted")
        moments = reversed(self.timeline.moments)
        return next((moment.where for moment in moments if moment.kind in taken), "")

    @property
    def failed(self) -> bool:
        return self.status is not None and self.status >= _ERROR

    @property
    def rank(self) -> tuple[bool, float]:
        """Failed calls before others, slow ones before fast ones: those with a higher rank are kept."""
        return self.failed, self.seconds


class CallRecords:
    """The records of calls that have ended, by their order of arrival."""

    def __init__(self) -> None:
        self._newest: OrderedDict[int, CallRecord] = OrderedDict()
        self._kept: OrderedDict[int, CallRecord] = OrderedDict()
        #: No kept call has a lower rank.
        self._floor = False, 0.0

    def get(self, order: int) -> CallRecord | None:
        return self._newest.get(order) or self._kept.get(order)

    def all(self) -> Iterator[tuple[int, CallRecord]]:
        return chain(self._kept.items(), self._newest.items())

    def add(self, order: int, record: CallRecord) -> tuple[int, CallRecord] | None:
        """Keeps a call that has just ended; returns one that is no longer kept."""
        self._newest[order] = record
        if len(self._newest) <= MAX_NEWEST:
            return None
        old, moved = self._newest.popitem(last=False)
        if len(self._kept) < MAX_KEPT:
            self._kept[old] = moved
            return None
        leaves = next(iter(self._kept))
        if (self._kept[leaves].ended or 0.0) >= (record.ended or 0.0) - KEEP_SECONDS:
            # Most calls are none of the slowest: they cost no search.
            if moved.rank <= self._floor:
                return old, moved
            leaves = min(self._kept, key=lambda each: self._kept[each].rank)
            self._floor = self._kept[leaves].rank
        self._floor = min(self._floor, moved.rank)
        self._kept[old] = moved
        return leaves, self._kept.pop(leaves)

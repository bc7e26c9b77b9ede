"""Waterfall of a call: its moments as spans. Pure: a record in, spans out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import msgspec

from triptych.proxy import events
from triptych.proxy.live.calls import CallRecord
from triptych.proxy.live.objects import StageSpan, Waterfall, short_address
from triptych.proxy.live.timeline import TIMED_ITEMS, Moment
from triptych.proxy.requests import instructions as do

PROXY, STORE = "proxy", "store"
_FOR_STEP = "for a step"
#: Notes of waits for items.
_FOR_ITEMS = ("for embeddings", "for the sizes of items")
IN_STORE = "in the store: no encoder job"
HELD = "held by the KV cache"
JOINED = "encoded for another request"
ALREADY = "in the store by then: the tower did not run"
#: Digits of a second of a result: microseconds.
_DIGITS = 6


def waterfall(record: CallRecord, now: float, worker_name: Callable[[str], str] = short_address) -> Waterfall:
    """Where the call's time went, up to its end or `now`."""
    timeline, start = record.timeline, record.started
    end = now if record.ended is None else record.ended
    phases = _Phases(start, timeline.items, timeline.rest)
    for moment in timeline.moments:
        phases.add(moment)
    items = [_clipped(span, start, end) for span in item_spans(timeline.moments, end)]
    tiles = _tiles(phases.phases, start, end)
    spans = [part for tile in tiles for part in _by_item(tile, items, timeline.titles)]
    spans += items
    if timeline.rest is not None:
        note = f"{timeline.items - TIMED_ITEMS} further items, summed"
        summed = StageSpan("encode", *timeline.rest, "", TIMED_ITEMS, note)
        spans.append(_clipped(summed, start, end))
    return Waterfall(
        id=record.label,
        model=record.model,
        started=record.started_at,
        seconds=None if record.ended is None else round(end - start, _DIGITS),
        status=record.status,
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens,
        cached_tokens=timeline.cached_tokens,
        choices=record.choices,
        attempts=timeline.attempt,
        items=timeline.items,
        titles=list(timeline.titles),
        media_tokens=record.media_tokens,
        spans=[msgspec.structs.replace(span, where=worker_name(span.where)) for span in spans],
    )


def _tiles(phases: list[RequestPhase], start: float, end: float) -> list[StageSpan]:
    """Each phase up to the next one: no gap and no overlap from 0 to the end."""
    tiles = []
    for phase, after in zip(phases, [*(phase.at for phase in phases[1:]), end], strict=True):
        tile = StageSpan(phase.name, phase.at, after, phase.where, None, phase.note, phase.attempt)
        tile = _clipped(tile, start, end)
        if tile.end > tile.start:
            tiles.append(tile)
    return tiles


def _clipped(span: StageSpan, start: float, end: float) -> StageSpan:
    """The part of a span inside the call, in seconds since its arrival."""

    def moment(at: float) -> float:
        return round(min(max(at, start), end) - start, _DIGITS)

    begin = moment(span.start)
    until = max(moment(span.end), begin)
    return msgspec.structs.replace(span, start=begin, end=until)


def _by_item(tile: StageSpan, items: list[StageSpan], titles: tuple[str, ...]) -> Iterator[StageSpan]:
    """The wait for items as the stages of the one that is ready last; any other tile as it is."""
    inside = [span for span in items if span.start < tile.end and span.end > tile.start]
    if not tile.note.startswith(_FOR_ITEMS) or not inside:
        yield tile
        return
    last = max(inside, key=lambda span: min(span.end, tile.end)).item or 0
    title = (titles[last] if last < len(titles) else "") or f"item {last + 1}"
    at = tile.start
    for span in sorted((span for span in inside if span.item == last), key=lambda span: span.start):
        begin, until = max(span.start, at), min(span.end, tile.end)
        if begin > at:
            yield msgspec.structs.replace(tile, start=at, end=begin)
        if until > begin:
            note = f"for {title}: {span.name}"
            yield msgspec.structs.replace(tile, start=begin, end=until, note=note, awaits=span.name)
        at = max(at, until)
    if at < tile.end:
        yield msgspec.structs.replace(tile, start=at)


@dataclass(frozen=True, slots=True)
class RequestPhase:
    """What the request does from the moment `at` on."""

    at: float
    name: str
    where: str
    note: str = ""
    attempt: int = 0


class _Phases:
    """The phases in order, the first from `start`; it reads the moments one by one.

    `rest`: the first and the last moment of items that are summed.
    """

    def __init__(self, start: float, items: int, rest: tuple[float, float] | None) -> None:
        self.phases = [RequestPhase(start, "fetch", PROXY)]
        self._items = items
        self._rest_end = rest[1] if rest else 0.0
        self._lacking = 0
        self._admitted = False
        self._first_token: Moment | None = None
        self._finished = False
        #: The present attempt goes on with the output, where another one was.
        self._taken_over = False

    def add(self, moment: Moment) -> None:
        match moment.kind:
            case events.Fetched:
                self._fetched(moment)
            case events.LookedUp if moment.item is None:
                self._begin(moment, "wait", PROXY, "for the sizes of items")
            case do.Submit:
                self._lacking, self._admitted = min(self._items, TIMED_ITEMS), False
                self._taken_over = False
                self._begin(moment, "queue", PROXY, "for a PD worker")
            case events.Accepted if not self._admitted:
                self._begin(moment, "queue", moment.where, "for memory")
            case "admitted":
                self._admitted = True
                self._wait_for_items(moment)
            case "item_loaded" | do.TellJobs:
                self._lacking -= 1
                if self._admitted and self._lacking == 0:
                    self._wait_for_items(moment)
            case events.FirstToken:
                self._first_token = moment
                self._begin(moment, "decode", moment.where)
            case do.TakeOver:
                self._taken_over = True
                self._begin(moment, "decode", moment.where, "taken over")
            case "finished":
                self._finish(moment)
            case do.EndAttempt:
                self._over(moment)

    def _begin(self, moment: Moment, name: str, where: str, note: str = "", at: float | None = None) -> None:
        """The phase from `at` on, or from the moment; never before the phase that it follows."""
        at = max(moment.at if at is None else at, self.phases[-1].at)
        self.phases.append(RequestPhase(at, name, where, note, moment.attempt))

    def _fetched(self, moment: Moment) -> None:
        start = self.phases[0].at
        began = max(moment.at - moment.spent[0], start)
        self.phases = [RequestPhase(start, "wait", PROXY, "for its turn and its model")]
        self._begin(moment, "fetch", PROXY, "" if self._items else "no media", began)
        if self._items:
            self._begin(moment, "wait", STORE, "look-up of its items")

    def _wait_for_items(self, moment: Moment) -> None:
        if self._lacking > 0:
            self._begin(moment, "wait", moment.where, "for embeddings")
        else:
            # Until the request has ended nothing tells its wait for a step from its prefill.
            self._begin(moment, "prefill", moment.where, "", max(moment.at, self._rest_end))

    def _finish(self, moment: Moment) -> None:
        """The PD worker's own seconds part prefill from what was before it, and decode in later attempts."""
        prefill, decode = moment.spent
        self._finished = True
        if self._taken_over:
            return  # it computed, and waited, while the other one was at work
        first = self._first_token
        same = first is not None and first.attempt == moment.attempt
        decoding = first.at if first is not None and same else moment.at - decode
        began = decoding - prefill
        where = next((p.where for p in reversed(self.phases) if p.attempt == moment.attempt), "")
        kept = [p for p in self.phases if p.attempt != moment.attempt or p.at < began]
        self.phases = [
            replace(p, name="queue", note=_FOR_STEP)
            if p.attempt == moment.attempt and p.name == "prefill"
            else p
            for p in kept
        ]
        self._begin(moment, "prefill", where, at=began)
        self._begin(moment, "decode", where, at=decoding)

    def _over(self, moment: Moment) -> None:
        if self._finished:
            self._begin(moment, "wait", PROXY, "until the reply is sent")
        else:
            self._begin(moment, "wait", PROXY, f"attempt {moment.attempt} is over")


def item_spans(moments: Iterable[Moment], end: float) -> list[StageSpan]:
    """The spans of all items, by item and then in order; those still under way last until `end`."""
    items: dict[int, _Item] = {}
    for moment in moments:
        if moment.item is not None:
            items.setdefault(moment.item, _Item(moment.item)).add(moment)
    return [span for index in sorted(items) for span in items[index].until(end)]


@dataclass(slots=True)
class _AwaitedJob:
    """An encoder job that the request waits for, since `at`."""

    at: float
    joined: bool
    note: str = ""
    planned: float | None = None


class _Item:
    """Reads the moments of one item."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._spans: list[StageSpan] = []
        self._awaited: _AwaitedJob | None = None
        #: When its embedding was in the store.
        self._stored = 0.0

    def add(self, moment: Moment) -> None:
        match moment.kind:
            case events.LookedUp:
                self._stored = moment.at
                self._add("encode", moment.at, moment.at, STORE, IN_STORE)
            case do.TellJobs:
                self._add("encode", moment.at, moment.at, moment.where, HELD, moment.attempt)
            case "waits" | do.StartJobs:
                again = "encoded again: the store had lost it" if moment.note == "again" else ""
                # A job that ended meanwhile is reported as joined, and ready at once.
                self._awaited = _AwaitedJob(moment.at, moment.note == "joined", again)
            case "planned" if self._awaited is not None:
                self._awaited.planned = moment.at
            case "failed" if self._awaited is not None:
                note = f"this try has failed: {moment.note}"
                self._add("encode", self._awaited.at, moment.at, moment.where, note)
                self._awaited = _AwaitedJob(moment.at, joined=False, note="another try")
            case "ready":
                self._ready(moment)
            case "item_loaded":
                began = max(moment.at - moment.spent[0], self._stored)
                by = {"shm": "by shared memory", "peer": "from the encoder worker"}.get(moment.note, "")
                note = by if moment.spent[0] else "resident at the PD worker"
                self._add("load", began, moment.at, moment.where, note, moment.attempt)
            case "item_missing":
                self._add("load", moment.at, moment.at, moment.where, "not found", moment.attempt)

    def until(self, end: float) -> list[StageSpan]:
        """All spans; what is still waited for lasts until `end`."""
        if self._awaited is None:
            return self._spans
        since, note = self._awaited.at, self._awaited.note or "not encoded yet"
        return [*self._spans, StageSpan("queue", since, max(end, since), PROXY, self._index, note)]

    def _add(self, name: str, start: float, end: float, where: str, note: str = "", attempt: int = 0) -> None:
        self._spans.append(StageSpan(name, min(start, end), end, where, self._index, note, attempt))

    def _ready(self, moment: Moment) -> None:
        awaited, self._awaited, self._stored = self._awaited, None, moment.at
        if awaited is None:
            return
        if awaited.joined or moment.note == "stored":
            note = JOINED if awaited.joined else ALREADY
            self._add("wait", awaited.at, moment.at, moment.where, note)
            return
        preprocess, encode, save = moment.spent
        saving = max(moment.at - save, awaited.at)
        encoding = max(saving - encode, awaited.at)
        planned = awaited.at + preprocess if awaited.planned is None else awaited.planned
        planned = min(max(planned, awaited.at), encoding)
        begun = max(planned - preprocess, awaited.at)
        for name, start, end, where, note in (
            ("queue", awaited.at, begun, PROXY, "for an encoder worker"),
            ("preprocess", begun, planned, moment.where, ""),
            ("queue", planned, encoding, moment.where, "for memory at a PD worker, and for the tower"),
            ("encode", encoding, saving, moment.where, awaited.note),
            ("save", saving, moment.at, STORE, ""),
        ):
            if end > start:
                self._add(name, start, end, where, note)

"""Spans of the items of one request, each from the first moment that it is wanted. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from triptych.proxy.live.objects import StageSpan
from triptych.proxy.live.request_phases import PROXY, STORE
from triptych.proxy.requests.timeline import Mark, Moment

IN_STORE = "in the store: no encoder job"
HELD = "held by the KV cache"
JOINED = "encoded for another request"
ALREADY = "in the store by then: the tower did not run"


def item_spans(moments: Iterable[Moment], end: float) -> list[StageSpan]:
    """The spans of all items, by item and then in order; those still under way last until `end`."""
    items: dict[int, _Item] = {}
    for moment in moments:
        if moment.item is not None:
            items.setdefault(moment.item, _Item(moment.item)).add(moment)
    return [span for index in sorted(items) for span in items[index].until(end)]


@dataclass(slots=True)
class _Wanted:
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
        self._wanted: _Wanted | None = None
        #: When its embedding was in the store.
        self._stored = 0.0

    def add(self, moment: Moment) -> None:
        match moment.mark:
            case Mark.STORED:
                self._stored = moment.at
                self._add("encode", moment.at, moment.at, STORE, IN_STORE)
            case Mark.HELD:
                self._add("encode", moment.at, moment.at, moment.where, HELD, moment.attempt)
            case Mark.WANTED:
                again = "encoded again: the store had lost it" if moment.note == "again" else ""
                # A job that ended meanwhile is reported as joined, and ready at once.
                self._wanted = _Wanted(moment.at, moment.note == "joined", again)
            case Mark.PLANNED if self._wanted is not None:
                self._wanted.planned = moment.at
            case Mark.RETRIED if self._wanted is not None:
                note = f"this try has failed: {moment.note}"
                self._add("encode", self._wanted.at, moment.at, moment.where, note)
                self._wanted = _Wanted(moment.at, joined=False, note="another try")
            case Mark.READY:
                self._ready(moment)
            case Mark.LOADED:
                began = max(moment.at - moment.spent[0], self._stored)
                note = "" if moment.spent[0] else "resident at the PD worker"
                self._add("load", began, moment.at, moment.where, note, moment.attempt)
            case Mark.MISSING:
                self._add("load", moment.at, moment.at, moment.where, "not found", moment.attempt)

    def until(self, end: float) -> list[StageSpan]:
        """All spans; what is still waited for lasts until `end`."""
        if self._wanted is None:
            return self._spans
        since, note = self._wanted.at, self._wanted.note or "not encoded yet"
        return [*self._spans, StageSpan("queue", since, max(end, since), PROXY, self._index, note)]

    def _add(self, name: str, start: float, end: float, where: str, note: str = "", attempt: int = 0) -> None:
        self._spans.append(StageSpan(name, min(start, end), end, where, self._index, note, attempt))

    def _ready(self, moment: Moment) -> None:
        wanted, self._wanted, self._stored = self._wanted, None, moment.at
        if wanted is None:
            return
        if wanted.joined or moment.note == "stored":
            note = JOINED if wanted.joined else ALREADY
            self._add("wait", wanted.at, moment.at, moment.where, note)
            return
        preprocess, encode, save = moment.spent
        saving = max(moment.at - save, wanted.at)
        encoding = max(saving - encode, wanted.at)
        planned = wanted.at + preprocess if wanted.planned is None else wanted.planned
        planned = min(max(planned, wanted.at), encoding)
        begun = max(planned - preprocess, wanted.at)
        for name, start, end, where, note in (
            ("queue", wanted.at, begun, PROXY, "for an encoder worker"),
            ("preprocess", begun, planned, moment.where, ""),
            ("queue", planned, encoding, moment.where, "for room at a PD worker, and for the tower"),
            ("encode", encoding, saving, moment.where, wanted.note),
            ("save", saving, moment.at, STORE, ""),
        ):
            if end > start:
                self._add(name, start, end, where, note)

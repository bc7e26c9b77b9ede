"""Phases of one request: each begins where the one before it ends. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from triptych.proxy.requests.timeline import TIMED_ITEMS, Mark, Moment

PROXY, STORE = "proxy", "store"
_FOR_STEP = "for a step"


@dataclass(frozen=True, slots=True)
class RequestPhase:
    """What the request does from the moment `at` on."""

    at: float
    name: str
    where: str
    note: str = ""
    attempt: int = 0


def request_phases(
    moments: Iterable[Moment], start: float, items: int, rest: tuple[float, float] | None = None
) -> list[RequestPhase]:
    """The phases in order, the first from `start`. `rest`: first and last moment of items that are summed."""
    phases = _Phases(start, items, rest)
    for moment in moments:
        phases.add(moment)
    return phases.found


class _Phases:
    """Reads the moments one by one."""

    def __init__(self, start: float, items: int, rest: tuple[float, float] | None) -> None:
        self.found = [RequestPhase(start, "fetch", PROXY)]
        self._items = items
        self._rest_end = rest[1] if rest else 0.0
        self._lacking = 0
        self._admitted = False
        self._first_token: Moment | None = None
        self._finished = False

    def add(self, moment: Moment) -> None:
        match moment.mark:
            case Mark.FETCHED:
                self._fetched(moment)
            case Mark.LOOKED_UP:
                self._begin(moment, "wait", PROXY, "for the sizes of items")
            case Mark.SUBMITTED:
                self._lacking, self._admitted = min(self._items, TIMED_ITEMS), False
                self._begin(moment, "queue", PROXY, "for a PD worker")
            case Mark.ACCEPTED if not self._admitted:
                self._begin(moment, "queue", moment.where, "for room")
            case Mark.ADMITTED:
                self._admitted = True
                self._wait_for_items(moment)
            case Mark.LOADED | Mark.HELD:
                self._lacking -= 1
                if self._admitted and self._lacking == 0:
                    self._wait_for_items(moment)
            case Mark.FIRST_TOKEN:
                self._first_token = moment
                self._begin(moment, "decode", moment.where)
            case Mark.FINISHED:
                self._finish(moment)
            case Mark.ATTEMPT_OVER:
                self._over(moment)

    def _begin(self, moment: Moment, name: str, where: str, note: str = "", at: float | None = None) -> None:
        """The phase from `at` on, or from the moment; never before the phase that it follows."""
        at = max(moment.at if at is None else at, self.found[-1].at)
        self.found.append(RequestPhase(at, name, where, note, moment.attempt))

    def _fetched(self, moment: Moment) -> None:
        start = self.found[0].at
        began = max(moment.at - moment.spent[0], start)
        self.found = [RequestPhase(start, "wait", PROXY, "for its turn and its model")]
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
        first = self._first_token
        same = first is not None and first.attempt == moment.attempt
        decoding = first.at if first is not None and same else moment.at - decode
        began = decoding - prefill
        where = next((p.where for p in reversed(self.found) if p.attempt == moment.attempt), "")
        kept = [p for p in self.found if p.attempt != moment.attempt or p.at < began]
        self.found = [
            replace(p, name="queue", note=_FOR_STEP)
            if p.attempt == moment.attempt and p.name == "prefill"
            else p
            for p in kept
        ]
        self._begin(moment, "prefill", where, at=began)
        self._begin(moment, "decode", where, at=decoding)
        self._finished = True

    def _over(self, moment: Moment) -> None:
        if self._finished:
            self._begin(moment, "wait", PROXY, "until the reply is sent")
        else:
            self._begin(moment, "wait", PROXY, f"attempt {moment.attempt} is over")

"""Records of calls: what their waterfalls are made from, and which ones are kept once they have ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

import msgspec

from triptych.proxy.events import Accepted, Admitted
from triptych.proxy.requests.views import RequestTimeline

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

    @property
    def seconds(self) -> float:
        """The time from arrival to end; 0 in flight."""
        return 0.0 if self.ended is None else self.ended - self.started

    @property
    def pd_address(self) -> str:
        """The last PD worker that had it; empty where none did."""
        taken = (Accepted, Admitted)
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

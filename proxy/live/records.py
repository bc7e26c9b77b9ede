"""Records of calls: what their waterfalls are made from, and which ones are kept once they have ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

import msgspec

from triptych.proxy.events import Accepted, Admitted
from triptych.proxy.requests.views import RequestTimeline

#: Calls that are kept: the newest, and of older ones the slowest and those that failed.
MAX_NEWEST, MAX_SLOW, MAX_FAILED = 256, 64, 64
#: Seconds for which a slow call is kept.
SLOW_SECONDS = 600.0
_ERROR = 400


class CallRecord(msgspec.Struct, frozen=True):
    """What the waterfall of a call is made from, in flight and afterwards; nothing of the call's content.

    `label` names it to its tenant alone. `started`, `first_token` and `ended` are moments of the proxy's
    clock, `started_at` is the time of day; without `ended` and `status` it is in flight. `internal`: the
    proxy itself has made it for another call.
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
    internal: bool = False

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


class CallRecords:
    """The records of calls that have ended, by their order of arrival."""

    def __init__(self) -> None:
        self._newest: OrderedDict[int, CallRecord] = OrderedDict()
        self._slow: OrderedDict[int, CallRecord] = OrderedDict()
        self._failed: OrderedDict[int, CallRecord] = OrderedDict()

    def get(self, order: int) -> CallRecord | None:
        kept = (self._newest, self._slow, self._failed)
        return next((records[order] for records in kept if order in records), None)

    def all(self) -> Iterator[tuple[int, CallRecord]]:
        return chain(self._failed.items(), self._slow.items(), self._newest.items())

    def add(self, order: int, record: CallRecord) -> Iterator[tuple[int, CallRecord]]:
        """Keeps a call that has just ended; yields those that are no longer kept."""
        self._newest[order] = record
        if len(self._newest) <= MAX_NEWEST:
            return
        old, moved = self._newest.popitem(last=False)
        if moved.failed:
            self._failed[old] = moved
            if len(self._failed) > MAX_FAILED:
                yield self._failed.popitem(last=False)
            return
        self._slow[old] = moved
        if len(self._slow) > MAX_SLOW:
            yield self._pop_slow((record.ended or 0.0) - SLOW_SECONDS)

    def _pop_slow(self, since: float) -> tuple[int, CallRecord]:
        """Takes out the oldest where that has ended before `since`, else the fastest."""
        order = next(iter(self._slow))
        if (self._slow[order].ended or 0.0) >= since:
            order = min(self._slow, key=lambda each: self._slow[each].seconds)
        return order, self._slow.pop(order)

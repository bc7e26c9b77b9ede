"""Timeline of a request: moments of its life by the proxy's clock, for its waterfall. No token adds one."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from triptych.proxy.ports import JobReady
from triptych.types import PDTimings, Usage

#: Items whose moments are kept one by one; those of further ones are summed.
TIMED_ITEMS = 16
#: Moments of one request; what comes after them is not noted.
MOST_MOMENTS = 192
#: Characters of a note.
_NOTE = 120


class Mark(enum.Enum):
    """The event that a moment is of. Those from WANTED to LOADED are of one item."""

    #: Its media are there and hashed; `spent` is how long that took.
    FETCHED = enum.auto()
    LOOKED_UP = enum.auto()
    #: An encoder job is asked for; `note` is "joined" where it was there for another request.
    WANTED = enum.auto()
    STORED = enum.auto()
    PLANNED = enum.auto()
    #: A try at the worker `where` has failed; `note` says why.
    RETRIED = enum.auto()
    #: `spent`: preprocessing, tower, save; `note` is "stored" where the tower did not run.
    READY = enum.auto()
    #: The PD worker's KV cache holds it.
    HELD = enum.auto()
    #: The PD worker did not find it.
    MISSING = enum.auto()
    #: `spent`: the load.
    LOADED = enum.auto()
    #: An attempt begins: the request waits for a PD worker.
    SUBMITTED = enum.auto()
    ACCEPTED = enum.auto()
    ADMITTED = enum.auto()
    FIRST_TOKEN = enum.auto()
    ATTEMPT_OVER = enum.auto()
    #: `spent`: prefill, decode.
    FINISHED = enum.auto()


class Moment(NamedTuple):
    """One event. `item` is its place among the request's distinct items; None: it is of the whole request."""

    at: float
    mark: Mark
    attempt: int = 0
    item: int | None = None
    where: str = ""
    note: str = ""
    spent: tuple[float, ...] = ()


_FIELDS = len(Moment._fields)
_MOST_NOTED = MOST_MOMENTS * _FIELDS


class RequestTimeline:
    """The moments of one request in order; bounded. `clock` is the proxy's."""

    __slots__ = ("_clock", "_indices", "_noted", "attempt", "cached_tokens", "items", "loaded", "rest")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._indices: dict[str, int] = {}
        #: The fields of all moments one after another: most timelines are never read, and a tuple for each
        #: moment would cost every request its making, and the garbage collector its visits.
        self._noted: list[Any] = []
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
        """What has been noted, in order."""
        noted = self._noted
        return [Moment(*noted[first : first + _FIELDS]) for first in range(0, len(noted), _FIELDS)]

    def fetched(self, mm_hashes: Iterable[str], seconds: float) -> None:
        """The request is split; `mm_hashes` are its items in order."""
        if keys := list(dict.fromkeys(mm_hashes)):
            self.items = len(keys)
            self._indices = {key: index for index, key in enumerate(keys[:TIMED_ITEMS])}
        self.mark(Mark.FETCHED, spent=(seconds,))

    def submitted(self, attempt: int) -> None:
        """An attempt begins; moments of those before it are ignored from now on."""
        self.attempt, self.loaded = attempt, 0
        self.mark(Mark.SUBMITTED)

    def ready(self, mm_hash: str, end: JobReady) -> None:
        """An encoder job has ended with the embedding in the store."""
        spent = (end.preprocess_seconds, end.encode_seconds, end.save_seconds)
        note = "stored" if end.already_stored else ""
        self.mark(Mark.READY, mm_hash, where=end.address, note=note, spent=spent)

    def finished(self, attempt: int, usage: Usage, spent: PDTimings) -> None:
        """The answer is complete."""
        self.cached_tokens = usage.cached_tokens
        self.mark(Mark.FINISHED, attempt=attempt, spent=(spent.prefill, spent.decode))

    def mark(
        self,
        mark: Mark,
        mm_hash: str = "",
        *,
        attempt: int | None = None,
        where: str = "",
        note: str = "",
        spent: tuple[float, ...] = (),
    ) -> None:
        """Notes what happens now, to one item or to the request; an `attempt` that is over is ignored."""
        if attempt is not None and attempt != self.attempt:
            return
        now, index = self._clock(), None
        if mm_hash:
            if mark is Mark.LOADED or mark is Mark.HELD:
                self.loaded += 1
            index = self._indices.get(mm_hash)
            if index is None:
                self.rest = (self.rest[0] if self.rest else now, now)
                return
        if len(self._noted) < _MOST_NOTED:
            self._noted += (now, mark, self.attempt, index, where, note[:_NOTE] if note else "", spent)


class UnwatchedTimeline(RequestTimeline):
    """The timeline of all requests that nobody watches: it notes nothing."""

    __slots__ = ()

    def fetched(self, mm_hashes: Iterable[str], seconds: float) -> None: ...

    def submitted(self, attempt: int) -> None: ...

    def ready(self, mm_hash: str, end: JobReady) -> None: ...

    def finished(self, attempt: int, usage: Usage, spent: PDTimings) -> None: ...

    def mark(
        self,
        mark: Mark,
        mm_hash: str = "",
        *,
        attempt: int | None = None,
        where: str = "",
        note: str = "",
        spent: tuple[float, ...] = (),
    ) -> None: ...


UNWATCHED = UnwatchedTimeline(time.monotonic)

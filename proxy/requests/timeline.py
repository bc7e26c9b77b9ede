"""Timeline of a request: moments of its life by the proxy's clock, for its waterfall. No token adds one."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

from triptych.proxy.encoders.job import JobRetried
from triptych.proxy.requests import events
from triptych.proxy.requests import instructions as do
from triptych.proxy.requests.events import Event

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
    """The moments of one request in order; bounded. A `RequestView`."""

    __slots__ = ("_indices", "_noted", "attempt", "cached_tokens", "items", "loaded", "rest")

    def __init__(self) -> None:
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

    def observe(self, event: Event, at: float, address: str, origins: Mapping[str, str]) -> None:
        """Notes what a waterfall shows of the event; one of an attempt that is over is ignored."""
        match event:
            case events.AttemptEvent():
                if event.attempt == self.attempt:
                    self._observe_attempt(event, at, address)
            case do.Submit():
                self.attempt, self.loaded = event.attempt, 0
                self._note(at, Mark.SUBMITTED)
            case do.EndAttempt():
                self._note(at, Mark.ATTEMPT_OVER)
            case events.FirstToken():
                self._note(at, Mark.FIRST_TOKEN, where=address)
            case events.Fetched():
                if keys := list(dict.fromkeys(event.mm_hashes)):
                    self.items = len(keys)
                    self._indices = {key: index for index, key in enumerate(keys[:TIMED_ITEMS])}
                self._note(at, Mark.FETCHED, spent=(event.seconds,))
            case _:
                self._observe_items(event, at, address, origins)

    def _observe_attempt(self, event: events.AttemptEvent, at: float, address: str) -> None:
        match event:
            case events.Accepted():
                self._note(at, Mark.ACCEPTED, where=address)
            case events.Admitted():
                self._note(at, Mark.ADMITTED, where=address)
            case events.ItemLoaded():
                self._note_item(at, Mark.LOADED, event.mm_hash, address, spent=(event.seconds,))
            case events.ItemMissing():
                self._note_item(at, Mark.MISSING, event.mm_hash, address)
            case events.Finished():
                self.cached_tokens = event.usage.cached_tokens
                self._note(at, Mark.FINISHED, spent=(event.spent.prefill, event.spent.decode))

    def _observe_items(self, event: Event, at: float, address: str, origins: Mapping[str, str]) -> None:
        """What happens to items outside of PD workers."""
        match event:
            case events.LookedUp():
                self._note(at, Mark.LOOKED_UP)
                for key in event.stored:
                    self._note_item(at, Mark.STORED, key)
            case do.StartJobs(re_encode=True):
                for key in event.mm_hashes:
                    self._note_item(at, Mark.WANTED, key, note="again")
            case events.JobsStarted():
                for key in event.mm_hashes:
                    self._note_item(at, Mark.WANTED, key, note=origins[key])
            case events.Planned():
                self._note_item(at, Mark.PLANNED, event.mm_hash)
            case JobRetried():
                self._note_item(at, Mark.RETRIED, event.mm_hash, event.address, event.why)
            case events.ItemReady(mm_hash=key, end=end):
                spent = (end.preprocess_seconds, end.encode_seconds, end.save_seconds)
                note = "stored" if end.already_stored else ""
                self._note_item(at, Mark.READY, key, end.address, note, spent)
            case do.SkipJob():
                self._note_item(at, Mark.HELD, event.mm_hash, address)

    def _note_item(
        self,
        at: float,
        mark: Mark,
        mm_hash: str,
        where: str = "",
        note: str = "",
        spent: tuple[float, ...] = (),
    ) -> None:
        if mark is Mark.LOADED or mark is Mark.HELD:
            self.loaded += 1
        index = self._indices.get(mm_hash)
        if index is None:
            self.rest = (self.rest[0] if self.rest else at, at)
        else:
            self._note(at, mark, index, where, note[:_NOTE] if note else "", spent)

    def _note(
        self,
        at: float,
        mark: Mark,
        item: int | None = None,
        where: str = "",
        note: str = "",
        spent: tuple[float, ...] = (),
    ) -> None:
        if len(self._noted) < _MOST_NOTED:
            self._noted += (at, mark, self.attempt, item, where, note, spent)

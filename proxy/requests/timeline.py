"""Timeline of a request: moments of its life by the proxy's clock, for its waterfall. No token adds one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

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

Seconds = tuple[float, ...]


class Moment(NamedTuple):
    """One event. `item` is its place among the request's distinct items; None: it is of the whole request.

    An item's `note` says why a try has failed, that its job is another request's ("joined"), that
    it is encoded "again", or that the tower did not run ("stored"). `spent` are the seconds of the fetch, the
    load, of preprocessing, tower and save, or of prefill and decode.
    """

    at: float
    kind: type[Event]
    attempt: int = 0
    item: int | None = None
    where: str = ""
    note: str = ""
    spent: Seconds = ()


_FIELDS = len(Moment._fields)
_MOST_NOTED = MOST_MOMENTS * _FIELDS
_ITEMS = frozenset(get_args(events.ItemEvent))
_SHOWN = _ITEMS | frozenset(get_args(events.StageEvent))


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
        spent: Seconds = ()
        kind = type(event)
        if kind not in _SHOWN or (isinstance(event, events.AttemptEvent) and event.attempt != self.attempt):
            return
        match event:
            case do.Submit():
                self.attempt, self.loaded = event.attempt, 0
            case events.Fetched():
                if keys := list(dict.fromkeys(event.mm_hashes)):
                    self.items = len(keys)
                    self._indices = {key: index for index, key in enumerate(keys[:TIMED_ITEMS])}
                spent = (event.seconds,)
            case events.Finished():
                self.cached_tokens = event.usage.cached_tokens
                spent = (event.spent.prefill, event.spent.decode)
            case _ if kind in _ITEMS:
                self._observe_items(event, at, address, origins)
                return
        self._note(at, kind, None, address, "", spent)

    def _observe_items(self, event: Event, at: float, address: str, origins: Mapping[str, str]) -> None:
        kind = type(event)
        match event:
            case events.LookedUp():
                self._note(at, kind, None, "", "", ())
                for key in event.stored:
                    self._note_item(at, kind, key)
            case do.StartJobs(re_encode=True):
                for key in event.mm_hashes:
                    self._note_item(at, kind, key, note="again")
            case events.JobsStarted():
                for key in event.mm_hashes:
                    self._note_item(at, kind, key, note=origins[key])
            case JobRetried():
                self._note_item(at, kind, event.mm_hash, event.address, event.why[:_NOTE])
            case events.ItemReady(mm_hash=key, end=end):
                spent = (end.preprocess_seconds, end.encode_seconds, end.save_seconds)
                self._note_item(at, kind, key, end.address, "stored" if end.already_stored else "", spent)
            case events.LoadReported():
                self.loaded += 1
                self._note_item(at, kind, event.mm_hash, address, spent=(event.seconds,))
            case do.SkipJob():
                self.loaded += 1
                self._note_item(at, kind, event.mm_hash, address)
            case events.PlanReported() | events.MissReported():
                self._note_item(at, kind, event.mm_hash, address)

    def _note_item(
        self, at: float, kind: type[Event], key: str, where: str = "", note: str = "", spent: Seconds = ()
    ) -> None:
        index = self._indices.get(key)
        if index is None:
            self.rest = (self.rest[0] if self.rest else at, at)
        else:
            self._note(at, kind, index, where, note, spent)

    def _note(
        self, at: float, kind: type[Event], item: int | None, where: str, note: str, spent: Seconds
    ) -> None:
        if len(self._noted) < _MOST_NOTED:
            self._noted += (at, kind, self.attempt, item, where, note, spent)

"""Timeline of a request: the moments that its waterfall is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from triptych.protos.convert import plan_nbytes
from triptych.proxy import events
from triptych.proxy.events import told
from triptych.proxy.requests import instructions as do
from triptych.proxy.requests.recorder import Event, Items

#: What a moment is of: the type of an event or instruction, or the alternative of a worker's message.
Kind = type[Event] | str
#: Items whose moments are kept one by one; those of further ones are summed.
TIMED_ITEMS = 16
#: Moments of one request; later ones are dropped.
MAX_MOMENTS = 192
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
    kind: Kind
    attempt: int = 0
    item: int | None = None
    where: str = ""
    note: str = ""
    spent: Seconds = ()


_FIELDS = len(Moment._fields)
_MAX_VALUES = MAX_MOMENTS * _FIELDS
#: Events of items.
_ITEMS = {
    events.LookedUp,
    do.StartJobs,
    events.JobEvent,
    do.TellJobs,
}
_SHOWN = _ITEMS | {
    events.Fetched,
    do.Submit,
    events.Accepted,
    events.WorkerEvent,
    events.FirstToken,
    do.TakeOver,
    do.EndAttempt,
}


class RequestTimeline:
    """The moments of one request in order, for its waterfall; bounded. No token adds one. A `RequestView`."""

    __slots__ = (
        "_keys", "_on_load", "_values", "attempt", "cached_tokens", "items", "loaded", "rest", "titles",
    )  # fmt: skip

    def __init__(self, on_load: Callable[[str, int], None] = lambda way, nbytes: None) -> None:
        #: Called for each embedding that a PD worker has loaded, with its way and bytes.
        self._on_load = on_load
        #: Of the items whose moments are kept one by one.
        self._keys: tuple[str, ...] = ()
        #: Of the same items.
        self.titles: tuple[str, ...] = ()
        #: The fields of all moments one after another: most timelines are never read, and a tuple for each
        #: moment would cost every request its making, and the garbage collector its visits.
        self._values: list[Any] = []
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
        """The moments, in order."""
        values = self._values
        return [Moment(*values[first : first + _FIELDS]) for first in range(0, len(values), _FIELDS)]

    def observe(self, event: Event, at: float, address: str, items: Items) -> None:
        """Notes what a waterfall shows of the event; one of an attempt that is over is ignored."""
        kind: Kind = type(event)
        if kind not in _SHOWN or (isinstance(event, events.AttemptEvent) and event.attempt != self.attempt):
            return
        spent: Seconds = ()
        match event:
            case do.Submit():
                self.attempt, self.loaded = event.attempt, 0
            case do.TakeOver():
                self.attempt = event.attempt
            case events.Fetched():
                self.items = len(event.params)
                self._keys, self.titles = tuple(event.params)[:TIMED_ITEMS], event.titles[:TIMED_ITEMS]
                spent = (event.seconds,)
            case events.WorkerEvent():
                self._observe_worker(event, at, address, items)
                return
            case _ if kind in _ITEMS:
                self._observe_item(event, at, address)
                return
        self._note(at, kind, None, address, "", spent)

    def _observe_worker(self, event: events.WorkerEvent, at: float, address: str, items: Items) -> None:
        match kind := told(event):
            case "admitted":
                self._note(at, kind, None, address, "", ())
            case "finished" if events.served(event):
                end = event.finished
                self.cached_tokens = end.cached_tokens
                self._note(at, kind, None, address, "", (end.prefill_seconds, end.decode_seconds))
            case "item_loaded":
                load, item = event.item_loaded, items.get(event.item_loaded.mm_hash)
                if item is not None and item.expected:
                    return  # TellJobs follows, the first time
                self.loaded += 1
                self._note_item(at, kind, load.mm_hash, address, load.path[:_NOTE], (load.seconds,))
                if load.seconds > 0:
                    plan = None if item is None else item.plan
                    self._on_load(load.path or "store", 0 if plan is None else plan_nbytes(plan))
            case "item_missing":
                self._note_item(at, kind, event.item_missing.mm_hash, address)

    def _observe_item(self, event: Event, at: float, address: str) -> None:
        kind = type(event)
        match event:
            case events.LookedUp():
                self._note(at, kind, None, "", "", ())
                for key in event.plans:
                    self._note_item(at, kind, key)
            case do.StartJobs(re_encode=True):
                for key in event.mm_hashes:
                    self._note_item(at, kind, key, note="again")
            case events.JobEvent():
                self._observe_job(event, at)
            case do.TellJobs(held=True):
                self.loaded += 1
                self._note_item(at, kind, event.mm_hash, address)

    def _observe_job(self, job: events.JobEvent, at: float) -> None:
        match kind := told(job):
            case "waits":
                self._note_item(at, kind, job.mm_hash, note=job.waits.origin)
            case "planned":
                self._note_item(at, kind, job.mm_hash, job.address)
            case "failed" if job.failed.retryable:
                self._note_item(at, kind, job.mm_hash, job.address, job.failed.error.message[:_NOTE])
            case "ready":
                end = job.ready
                spent = (end.preprocess_seconds, end.encode_seconds, end.save_seconds)
                note = "stored" if end.already_stored else ""
                self._note_item(at, kind, job.mm_hash, job.address, note, spent)

    def _note_item(
        self, at: float, kind: Kind, key: str, where: str = "", note: str = "", spent: Seconds = ()
    ) -> None:
        if key in self._keys:
            self._note(at, kind, self._keys.index(key), where, note, spent)
        else:
            self.rest = (self.rest[0] if self.rest else at, at)

    def _note(self, at: float, kind: Kind, item: int | None, where: str, note: str, spent: Seconds) -> None:
        if len(self._values) < _MAX_VALUES:
            self._values += (at, kind, self.attempt, item, where, note, spent)

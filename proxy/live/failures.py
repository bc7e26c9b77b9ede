"""Failures that an operator should see, of requests, workers and the store: plain words and a remedy."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass

from triptych.base.errors import RequestError
from triptych.proxy.live.objects import FailureRow, short_address
from triptych.proxy.workers import KnownWorkers, Worker

#: Longest reason; a registration's text is in it.
_MAX_TEXT = 300
MAX_FAILURES = 32
#: Kinds of refusals, in a log of their own: they push no failures out.
MAX_REFUSALS = 8
_ERROR_ID = re.compile(r"error id ([0-9a-f]{8,32})")
#: What a failed request's error says, as a part of it: words and remedy of our own. Its text is left out: it
#: may name a field of a tenant's request.
_KNOWN = (
    ("no encoder worker", "no encoder worker could be reached in time", "start encoder workers of its model"),
    ("no PD worker", "no PD worker could be reached in time", "start PD workers of its model"),
    (
        "no embedding store",
        "the embedding store could not be reached in time",
        "start the store, or mend the network between it and the proxy",
    ),
    (
        "the store keeps losing",
        "the store loses embeddings before they are used",
        "give the store more memory (maxmemory), or start more PD workers",
    ),
    ("its media did not arrive", "media could not be fetched in time", "see whether their hosts answer"),
    ("request's media did not", "media could not be fetched in time", "see whether their hosts answer"),
    (
        "PD workers ended while",
        "it ended several PD workers, and is not tried again",
        "search the log for the error id; the workers' logs say how they ended",
    ),
    ("this proxy is stopping", "this proxy is stopping", "send requests to another proxy"),
    ("the proxy is stopping", "this proxy is stopping", "send requests to another proxy"),
)
_BY_STATUS = {
    500: ("an internal error", "search the logs of the proxy and the workers for errors at this time"),
    503: ("something that it needs is not there", "see which workers and whether the store are up"),
    504: ("its timeout is over", "see whether queues grow: start workers, or raise --request-timeout"),
}
_REFUSED = {
    401: "give these clients a valid API key",
    503: "see which workers and whether the store are up",
    404: "compare the model and the path that clients name with GET /v1/models and /docs",
}
_REASON = "see what their clients send; the answers name the field and the remedy"
_OTHER = ("an error", "search the proxy's log for errors at this time")


@dataclass(slots=True)
class _Failure:
    time: float
    remedy: str
    count: int = 1


class FailureLog:
    """The failures, newest last; equal ones are one entry with a count."""

    def __init__(self, limit: int = MAX_FAILURES) -> None:
        self._limit = limit
        self._entries: dict[tuple[str, str], _Failure] = {}

    def add(self, time: float, what: str, remedy: str, where: str = "") -> None:
        before = self._entries.pop((what, where), None)
        self._entries[what, where] = _Failure(time, remedy, before.count + 1 if before else 1)
        while len(self._entries) > self._limit:
            del self._entries[next(iter(self._entries))]

    def add_request(self, time: float, error: RequestError) -> None:
        """A request that failed with a 5xx."""
        what, remedy = described(error)
        self.add(time, f"a request failed with {error.status}: {what}", remedy)

    def add_refusal(self, time: float, status: int, route: str) -> None:
        """A request that was refused before it was a call."""
        to = "other paths" if route == "other" else route
        self.add(time, f"requests to {to} are refused with {status}", _REFUSED.get(status, _REASON))

    def read(self) -> list[FailureRow]:
        """Newest first."""
        return [
            FailureRow(round(entry.time, 3), what, entry.remedy, where, entry.count)
            for (what, where), entry in reversed(self._entries.items())
        ]


def described(error: RequestError) -> tuple[str, str]:
    """A server's error in our own words, with what helps; only an error id is taken from its text."""
    known = (entry[1:] for entry in _KNOWN if entry[0] in error.message)
    what, remedy = next(known, _BY_STATUS.get(error.status, _OTHER))
    match = _ERROR_ID.search(error.message)
    return (f"{what} (error id {match[1]})" if match else what), remedy


class WorkerState(enum.StrEnum):
    """What a worker does, as its proxy sees it."""

    SERVING = "serving"
    STALLED = "stalled"
    LOST = "lost"
    DRAINING = "draining"
    MISMATCHED = "mismatched"


#: What an operator can do about a worker in such a state.
REMEDIES = {
    WorkerState.LOST: "see its log for how it ended; a supervisor starts it again, and what it had goes on "
    "at other workers meanwhile",
    WorkerState.STALLED: "its engine stands still: see its log; it ends itself after --stall-timeout and is "
    "started again, and what it had goes on at other workers",
    WorkerState.DRAINING: "it finishes what it has and leaves",
}


def worker_state(worker: Worker, *, set_aside: bool = False) -> tuple[WorkerState, str]:
    """The state and its remedy; `set_aside`: its stream shows that its engine stands still."""
    if not worker.alive:
        state = WorkerState.LOST
    elif not worker.registered and not worker.serving:
        state = WorkerState.DRAINING
    elif not worker.serving or set_aside:
        state = WorkerState.STALLED
    elif not worker.matched:
        text = worker.mismatch.text if worker.mismatch is not None else ""
        return WorkerState.MISMATCHED, text[:_MAX_TEXT]
    else:
        return WorkerState.SERVING, ""
    return state, REMEDIES[state]


POOL_NAMES = {"encoder": "encoder worker", "pd": "PD worker"}
_BAD = (WorkerState.LOST, WorkerState.STALLED, WorkerState.MISMATCHED)
_STORE_REMEDY = (
    "start the store, or mend the network between it and the proxy; text goes on, requests with media wait "
    "within their deadline"
)
_RESTART_REMEDY = "see its log for how the process before ended; what it had went on elsewhere"

Key = tuple[str, str]


class WorkerFailures:
    """A `WorkersListener`. `poll` gets every worker's state once a second; `time` is the time of day."""

    def __init__(
        self,
        workers: KnownWorkers,
        log: FailureLog,
        time: Callable[[], float],
        name: Callable[[str], str] = short_address,
    ) -> None:
        self._log = log
        self._time = time
        self._name = name
        self._states: dict[Key, WorkerState] = {}
        self._incarnations: dict[Key, str] = {}
        #: It has answered once before it can be down.
        self._store_up = False
        workers.subscribe(self)

    def workers_changed(self) -> None:
        """The next poll sees it."""

    def worker_lost(self, worker: Worker) -> None:
        """Seen at once: one that comes back within a second would not be seen by a poll."""
        # One that has drained has withdrawn its registration before.
        if worker.registered:
            self._turned((worker.info.pool, worker.info.address), WorkerState.LOST, "")

    def poll(self, states: dict[Key, tuple[Worker, WorkerState, str]], *, store_up: bool) -> None:
        """All workers with their states and remedies, now."""
        for key, (worker, state, reason) in states.items():
            noticed = self._states.get(key) is WorkerState.LOST
            self._turned(key, state, reason)
            before = self._incarnations.get(key, worker.info.incarnation)
            if before != worker.info.incarnation and not noticed:
                self._add(key, "was started again at its address", _RESTART_REMEDY)
        self._incarnations = {key: worker.info.incarnation for key, (worker, _, _) in states.items()}
        self._states = {key: self._states[key] for key in states}
        if self._store_up and not store_up:
            self._log.add(self._time(), "the embedding store does not answer", _STORE_REMEDY, "store")
        self._store_up = store_up

    def _turned(self, key: Key, state: WorkerState, reason: str) -> None:
        before = self._states.get(key, WorkerState.SERVING)
        self._states[key] = state
        if state is not before and state in _BAD:
            event = "does not fit" if state is WorkerState.MISMATCHED else f"is {state}"
            self._add(key, event, reason or REMEDIES[state])

    def _add(self, key: Key, event: str, remedy: str) -> None:
        pool, address = key
        where = self._name(address)
        self._log.add(self._time(), f"{POOL_NAMES.get(pool, 'worker')} {where} {event}", remedy, where)

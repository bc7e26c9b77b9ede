"""Watch over the workers and the store: what turns bad becomes a failure."""

from __future__ import annotations

from collections.abc import Callable

from triptych.proxy.live.failures import FailureLog
from triptych.proxy.live.names import short_address
from triptych.proxy.live.worker_states import REMEDIES, WorkerState
from triptych.proxy.workers import KnownWorkers, Worker

POOL_NAMES = {"encoder": "encoder worker", "pd": "PD worker"}
_BAD = (WorkerState.LOST, WorkerState.STALLED, WorkerState.MISMATCHED)
_STORE_REMEDY = (
    "start the store, or mend the network between it and the proxy; text goes on, requests with media wait "
    "within their deadline"
)
_RESTART_REMEDY = "see its log for how the process before ended; what it had went on elsewhere"

Key = tuple[str, str]


class WorkerFailures:
    """A `WorkersListener`. `look` gets every worker's state once a second; `time` is the time of day."""

    def __init__(self, workers: KnownWorkers, log: FailureLog, time: Callable[[], float]) -> None:
        self._log = log
        self._time = time
        self._states: dict[Key, WorkerState] = {}
        self._incarnations: dict[Key, str] = {}
        #: It has answered once before it can be down.
        self._store_up = False
        workers.subscribe(self)

    def workers_changed(self) -> None:
        """The next look sees it."""

    def worker_lost(self, worker: Worker) -> None:
        """Seen at once: one that comes back within a second would not be seen by a look."""
        # One that has drained has withdrawn its registration before.
        if worker.registered:
            self._turned((worker.info.pool, worker.info.address), WorkerState.LOST, "")

    def look(self, states: dict[Key, tuple[Worker, WorkerState, str]], *, store_up: bool) -> None:
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
            words = "does not fit" if state is WorkerState.MISMATCHED else f"is {state}"
            self._add(key, words, reason or REMEDIES[state])

    def _add(self, key: Key, words: str, remedy: str) -> None:
        pool, address = key
        where = short_address(address)
        self._log.add(self._time(), f"{POOL_NAMES.get(pool, 'worker')} {where} {words}", remedy, where)

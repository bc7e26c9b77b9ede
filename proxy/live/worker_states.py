"""States of workers, with the remedy where one does not serve. Pure."""

from __future__ import annotations

import enum

from triptych.proxy.workers import Worker

#: Longest reason; a registration's text is in it.
_MOST = 300


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
        return WorkerState.MISMATCHED, text[:_MOST]
    else:
        return WorkerState.SERVING, ""
    return state, REMEDIES[state]

"""States of workers."""

from __future__ import annotations

import pytest

from triptych.ec_connector.registry.matching import Mismatch
from triptych.proxy.live.worker_states import WorkerState, worker_state
from triptych.proxy.workers import Worker
from triptych.types import WorkerInfo

INFO = WorkerInfo("a:1", "pd", "i", "key", "model")


@pytest.mark.parametrize(
    ("worker", "set_aside", "state"),
    [
        (Worker(INFO), False, WorkerState.SERVING),
        (Worker(INFO), True, WorkerState.STALLED),
        (Worker(INFO, serving=False), False, WorkerState.STALLED),
        (Worker(INFO, alive=False, serving=False), False, WorkerState.LOST),
        (Worker(INFO, alive=False, serving=False), True, WorkerState.LOST),
        (Worker(INFO, serving=False, registered=False), False, WorkerState.DRAINING),
        # The store was flushed: it serves all the same.
        (Worker(INFO, registered=False), False, WorkerState.SERVING),
        (Worker(INFO, matched=False), False, WorkerState.MISMATCHED),
    ],
)
def test_a_worker_is_in_the_state_that_an_operator_sees(
    worker: Worker, set_aside: bool, state: WorkerState
) -> None:
    assert worker_state(worker, set_aside=set_aside)[0] is state


def test_a_worker_that_does_not_serve_has_a_remedy() -> None:
    assert worker_state(Worker(INFO)) == (WorkerState.SERVING, "")
    for worker in (
        Worker(INFO, alive=False),
        Worker(INFO, serving=False),
        Worker(INFO, serving=False, registered=False),
    ):
        assert worker_state(worker)[1]
    mismatch = Mismatch("row_width", "its rows are 3 wide: give both the same checkpoint")
    assert worker_state(Worker(INFO, mismatch=mismatch, matched=False))[1] == mismatch.text

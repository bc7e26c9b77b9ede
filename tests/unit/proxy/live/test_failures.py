"""Failures: plain words, bounded, nothing of a tenant's request in them; states of workers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from triptych.base.errors import DeadlineExceeded, InternalError, RequestError, Unavailable
from triptych.base.types import WorkerInfo
from triptych.proxy.live.failures import FailureLog, WorkerFailures, WorkerState, described, worker_state
from triptych.proxy.workers import KnownWorkers, Worker
from triptych.registry.matching import Mismatch


def test_equal_failures_are_one_entry_with_a_count_and_the_newest_time() -> None:
    log = FailureLog()
    log.add(1.0, "a", "do this", "w")
    log.add(2.0, "b", "do that")
    log.add(3.0, "a", "do this", "w")
    assert [(row.time, row.what, row.where, row.count) for row in log.read()] == [
        (3.0, "a", "w", 2),
        (2.0, "b", "", 1),
    ]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Unavailable("no encoder worker could be reached in time"), "no encoder worker"),
        (Unavailable("messages[0].content[2]: the store keeps losing this item's embedding"), "the store"),
        (DeadlineExceeded("the request took longer than its timeout"), "timeout"),
        (
            InternalError("3 PD workers ended while the request was at work (error id 0123456789abcdef)"),
            "ended",
        ),
        (InternalError("anything"), "an internal error"),
    ],
)
def test_a_failed_request_is_described_with_its_remedy(error: RequestError, words: str) -> None:
    what, remedy = described(error)
    assert words in what
    assert remedy


@pytest.mark.parametrize("kind", [InternalError, Unavailable, DeadlineExceeded])
def test_the_text_of_an_error_is_never_shown(kind: type[RequestError]) -> None:
    log = FailureLog()
    log.add_request(1.0, kind("messages[0]: https://secret.example/a.png of alice", param="messages[0]"))
    row = log.read()[0]
    assert "secret" not in row.what + row.remedy + row.where
    assert "alice" not in row.what + row.remedy and "messages" not in row.what + row.remedy
    assert str(kind.status) in row.what


KEY = ("encoder", "10.0.0.1:9000")
INFO = WorkerInfo(KEY[1], "encoder", "first", "key", "model", ("space",))


class Watched:
    """One encoder worker, and the failures that are noted of it."""

    def __init__(self) -> None:
        self.log = FailureLog()
        self.known = KnownWorkers()
        self.worker = Worker(INFO)
        self.failures = WorkerFailures(self.known, self.log, lambda: 7.0)
        self.poll()

    def poll(self, *, store_up: bool = True, gone: bool = False) -> None:
        states = {} if gone else {KEY: (self.worker, *worker_state(self.worker))}
        self.failures.poll(states, store_up=store_up)

    @property
    def said(self) -> list[tuple[str, int]]:
        return [(row.what, row.count) for row in self.log.read()]


def test_a_worker_that_is_lost_is_noted_at_once_and_once() -> None:
    watched = Watched()
    watched.worker.alive = False
    watched.known.report_loss(watched.worker)
    watched.poll()
    watched.poll()
    assert watched.said == [("encoder worker 10.0.0.1:9000 is lost", 1)]
    assert watched.log.read()[0].where == "10.0.0.1:9000"
    assert watched.log.read()[0].time == 7.0


def test_a_process_that_replaces_another_unseen_is_a_failure() -> None:
    watched = Watched()
    watched.worker.info = replace(INFO, incarnation="second")
    watched.poll()
    watched.poll()
    assert watched.said == [("encoder worker 10.0.0.1:9000 was started again at its address", 1)]


def test_a_store_that_does_not_answer_is_a_failure_each_time_it_stops() -> None:
    watched = Watched()
    for store_up in (False, False, True, False):
        watched.poll(store_up=store_up)
    assert watched.said == [("the embedding store does not answer", 2)]
    assert watched.log.read()[0].where == "store"


PD = WorkerInfo("a:1", "pd", "i", "key", "model")


@pytest.mark.parametrize(
    ("worker", "set_aside", "state"),
    [
        (Worker(PD), False, WorkerState.SERVING),
        (Worker(PD), True, WorkerState.STALLED),
        (Worker(PD, serving=False), False, WorkerState.STALLED),
        (Worker(PD, alive=False, serving=False), False, WorkerState.LOST),
        (Worker(PD, alive=False, serving=False), True, WorkerState.LOST),
        (Worker(PD, serving=False, registered=False), False, WorkerState.DRAINING),
        # The store was flushed: it serves all the same.
        (Worker(PD, registered=False), False, WorkerState.SERVING),
        (Worker(PD, matched=False), False, WorkerState.MISMATCHED),
    ],
)
def test_a_worker_is_in_the_state_that_an_operator_sees(worker, set_aside, state):
    assert worker_state(worker, set_aside=set_aside)[0] is state


def test_a_worker_that_does_not_serve_has_a_remedy() -> None:
    assert worker_state(Worker(PD)) == (WorkerState.SERVING, "")
    for worker in (
        Worker(PD, alive=False),
        Worker(PD, serving=False),
        Worker(PD, serving=False, registered=False),
    ):
        assert worker_state(worker)[1]
    mismatch = Mismatch("row_width", "its rows are 3 wide: give both the same checkpoint")
    assert worker_state(Worker(PD, mismatch=mismatch, matched=False))[1] == mismatch.text

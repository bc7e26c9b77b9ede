"""What turns bad becomes a failure, once."""

from __future__ import annotations

from dataclasses import replace

from triptych.proxy.live.failures import FailureLog
from triptych.proxy.live.worker_failures import WorkerFailures
from triptych.proxy.live.worker_states import worker_state
from triptych.proxy.workers import KnownWorkers, Worker
from triptych.types import WorkerInfo

KEY = ("encoder", "10.0.0.1:9000")
INFO = WorkerInfo(KEY[1], "encoder", "first", "key", "model", ("space",))


class Watched:
    """One encoder worker, and the failures that are noted of it."""

    def __init__(self) -> None:
        self.log = FailureLog()
        self.known = KnownWorkers()
        self.worker = Worker(INFO)
        self.failures = WorkerFailures(self.known, self.log, lambda: 7.0)
        self.look()

    def look(self, *, store_up: bool = True, gone: bool = False) -> None:
        states = {} if gone else {KEY: (self.worker, *worker_state(self.worker))}
        self.failures.look(states, store_up=store_up)

    @property
    def said(self) -> list[tuple[str, int]]:
        return [(row.what, row.count) for row in self.log.read()]


def test_a_worker_that_is_lost_is_noted_at_once_and_once() -> None:
    watched = Watched()
    watched.worker.alive = False
    watched.known.report_loss(watched.worker)
    watched.look()
    watched.look()
    assert watched.said == [("encoder worker 10.0.0.1:9000 is lost", 1)]
    assert watched.log.read()[0].where == "10.0.0.1:9000"
    assert watched.log.read()[0].time == 7.0


def test_a_worker_that_is_lost_again_is_counted() -> None:
    watched = Watched()
    for _ in range(2):
        watched.worker.alive = False
        watched.known.report_loss(watched.worker)
        watched.look()
        watched.worker.alive = True
        watched.look()
    assert watched.said == [("encoder worker 10.0.0.1:9000 is lost", 2)]


def test_a_worker_that_has_drained_is_no_failure() -> None:
    watched = Watched()
    watched.worker.registered = watched.worker.serving = False
    watched.look()
    watched.known.report_loss(watched.worker)
    watched.look(gone=True)
    assert watched.said == []


def test_a_worker_that_stalls_is_a_failure() -> None:
    watched = Watched()
    watched.worker.serving = False
    watched.look()
    assert watched.said == [("encoder worker 10.0.0.1:9000 is stalled", 1)]


def test_a_process_that_replaces_another_unseen_is_a_failure() -> None:
    watched = Watched()
    watched.worker.info = replace(INFO, incarnation="second")
    watched.look()
    watched.look()
    assert watched.said == [("encoder worker 10.0.0.1:9000 was started again at its address", 1)]


def test_a_process_that_replaces_a_lost_one_is_no_second_failure() -> None:
    watched = Watched()
    watched.worker.alive = False
    watched.known.report_loss(watched.worker)
    watched.worker.info = replace(INFO, incarnation="second")
    watched.worker.alive = True
    watched.look()
    watched.look()
    assert watched.said == [("encoder worker 10.0.0.1:9000 is lost", 1)]


def test_a_store_that_does_not_answer_is_a_failure_each_time_it_stops() -> None:
    watched = Watched()
    for store_up in (False, False, True, False):
        watched.look(store_up=store_up)
    assert watched.said == [("the embedding store does not answer", 2)]
    assert watched.log.read()[0].where == "store"


def test_workers_that_have_gone_are_forgotten() -> None:
    watched = Watched()
    watched.look(gone=True)
    assert not watched.failures._states and not watched.failures._incarnations

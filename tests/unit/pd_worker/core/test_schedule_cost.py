"""What a step's scheduling costs does not depend on how many requests wait, whatever they wait for."""

from __future__ import annotations

import pytest

from support.hostile.operations import operations
from support.queue_load import FullScheduler, TextScheduler, item_key
from triptych.pd_worker.core.admission import OrderedRequests
from triptych.pd_worker.core.request import RequestState

#: The logarithm of the number of requests, and nothing more, may show.
MOST_GROWTH = 1.5

SITUATIONS = {
    "embeddings": lambda requests: FullScheduler(requests, stored=False),
    "room": lambda requests: FullScheduler(requests, stored=False, reserve=1),
    "a slot": lambda requests: FullScheduler(requests, stored=True),
}


@pytest.mark.parametrize("what", SITUATIONS)
def test_a_step_costs_as_much_with_256_waiting_requests_as_with_16(what: str) -> None:
    few, many = (operations(SITUATIONS[what](requests).schedule) for requests in (16, 256))
    assert many < MOST_GROWTH * few


def test_an_item_that_comes_costs_as_much_with_256_waiting_requests_as_with_16() -> None:
    def coming(requests: int) -> int:
        full = FullScheduler(requests, stored=False)

        def come() -> None:
            full.scheduler.mark_ready([item_key(3, 5)], 0.0)
            for _ in range(3):
                full.step()

        return operations(come)

    assert coming(256) < MOST_GROWTH * coming(16)


def test_a_step_of_text_costs_as_much_with_10_000_waiting_requests_as_with_16() -> None:
    few, many = (operations(TextScheduler(8, waiting).step) for waiting in (16, 10_000))
    assert many < MOST_GROWTH * few


def test_a_step_looks_at_no_more_waiting_requests_than_it_could_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = TextScheduler(8, 100)

    def all_of_them(queue: OrderedRequests[RequestState]) -> None:
        raise AssertionError("a copy of a queue costs more the longer it is")

    monkeypatch.setattr(OrderedRequests, "__iter__", all_of_them)
    texts.step()
    assert texts.scheduler.num_running == 8 and texts.scheduler.num_waiting == 100


def test_a_request_more_that_runs_costs_a_step_as_much_as_the_one_before() -> None:
    one, many, twice = (operations(TextScheduler(running, 0).step) for running in (1, 128, 256))
    assert twice - many < MOST_GROWTH * (many - one)

"""What a step's scheduling costs does not depend on how many requests wait, whatever they wait for."""

from __future__ import annotations

import pytest

from benchmarks.micro.queue_load import FullScheduler, item_key
from support.hostile.operations import operations

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


@pytest.mark.parametrize("what", SITUATIONS)
def test_in_the_measured_step_all_requests_wait_and_text_runs(what: str) -> None:
    full = SITUATIONS[what](256)
    assert full.scheduler.num_waiting == 256
    assert len(full.schedule().chunks) == full.scheduler.num_running == 8

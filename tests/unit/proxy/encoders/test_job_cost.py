"""What an event costs the job table does not depend on how many items it holds."""

from __future__ import annotations

import pytest

from support.hostile.operations import operations
from support.queue_load import FullTable, PlannedTable
from triptych.proxy.encoders.job import EncoderJob, JobQueue

#: The logarithm of the number of jobs, and nothing more, may show.
MOST_GROWTH = 1.5
STEPS = 8


def cost(table: FullTable | PlannedTable, steps: int) -> float:
    return operations(lambda: [table.step() for _ in range(steps)]) / steps


def test_an_item_costs_as_much_among_4096_as_among_16() -> None:
    few, many = cost(FullTable(16), STEPS), cost(FullTable(4096), STEPS)
    assert many < MOST_GROWTH * few


def test_the_admission_and_the_end_of_a_request_cost_as_much_among_4096_planned_items_as_among_16() -> None:
    few, many = cost(PlannedTable(16), 1), cost(PlannedTable(4096), 1)
    assert many < MOST_GROWTH * few


@pytest.mark.parametrize("items", [16, 4096])
def test_every_step_of_the_measured_table_ends_one_item_and_brings_another(items: int) -> None:
    table = FullTable(items)
    ended = table.ended
    for _ in range(STEPS):
        table.step()
    assert table.ended == ended + STEPS
    assert len(table.jobs) == items


def test_changes_of_a_jobs_rank_leave_nothing_behind() -> None:
    queue, job = JobQueue(), EncoderJob("k", "n", 1)
    for order in range(10_000):
        job.order = order
        queue.push(job, job.rank)
    assert queue.first() == ((True, True, 0, 9_999), job)
    assert len(queue._heap) <= 67
    queue.discard(job)
    assert queue.first() is None

"""Planned jobs where encoders have come: they wait no longer behind more than their encoder's part."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.data.items import bare_plan
from support.hostile.operations import operations
from triptych.proxy.encoders.job import EncoderJob, EncoderSlot, JobState
from triptych.proxy.encoders.job_files import JobQueue
from triptych.proxy.encoders.job_table import EncoderJobTable
from triptych.proxy.encoders.work_model import WorkModel

SPACE = "n"
ITEMS_OF_A_REQUEST = 16
ENCODERS = 4


class FullTable:
    """`items` jobs of requests of 16 items each, at four encoders with few credits.

    `step` takes one item through its whole life in the table and puts another one in its place.
    """

    def __init__(self, items: int) -> None:
        self.jobs = EncoderJobTable(8)
        self.jobs.set_encoders(EncoderSlot(f"e{i}", (SPACE,), 4, 2) for i in range(ENCODERS))
        self._made = 0
        #: Jobs in preprocessing and in a tower, the oldest first.
        self._planning: list[EncoderJob] = []
        self._running: list[EncoderJob] = []
        for _ in range(items):
            self._want()
        self._pump()
        for _ in range(ITEMS_OF_A_REQUEST):
            self.step()

    def step(self) -> None:
        """The oldest item in preprocessing is planned and admitted, runs, is published and loaded."""
        self._want()
        self._pump()
        job = self._planning.pop(0)
        waiters = sorted(job.waiters)
        self.jobs.planned(job.try_id, bare_plan(job.mm_hash))
        self._pump()
        for request in waiters:
            self.jobs.admit(request)
        self._pump()
        job = self._running.pop(0)
        self.jobs.ready(job.try_id, bare_plan(job.mm_hash))
        self._pump()
        for request in waiters:
            self.jobs.loaded(request, job.mm_hash)
        self._pump()

    def _want(self) -> None:
        """Another item, of the request that is not full yet."""
        request = f"r{self._made // ITEMS_OF_A_REQUEST}"
        self.jobs.want(f"k{self._made}", request, SPACE)
        self._made += 1

    def _pump(self) -> None:
        for job in self.jobs.pump(1.0):
            (self._planning if job.state is JobState.PLANNING else self._running).append(job)


class PlannedTable:
    """`items` jobs that all have their plan and wait for the admission of their requests."""

    def __init__(self, items: int) -> None:
        self.jobs = EncoderJobTable(1 << 20)
        self.jobs.set_encoders([EncoderSlot("e1", (SPACE,), items, 2)])
        self._left = items // ITEMS_OF_A_REQUEST
        for index in range(items):
            self.jobs.want(f"k{index}", f"r{index // ITEMS_OF_A_REQUEST}", SPACE)
        for job in self.jobs.pump(1.0):
            self.jobs.planned(job.try_id, bare_plan(job.mm_hash))

    def step(self) -> None:
        """A request is admitted, what may run runs, and the request ends."""
        self._left -= 1
        request = f"r{self._left}"
        self.jobs.admit(request)
        self.jobs.pump(1.0)
        self.jobs.end_attempt(request)
        self.jobs.leave(request)
        self.jobs.pump(1.0)


def slots(count: int, credit: int = 99, tower: int = 1) -> list[EncoderSlot]:
    return [EncoderSlot(f"e{index}", (SPACE,), credit, tower) for index in range(count)]


def plan_all(jobs: EncoderJobTable, rows: int = 1) -> list[EncoderJob]:
    """Starts what may start, and answers with a plan."""
    made = [job for job in jobs.pump(0.0) if job.state is JobState.PLANNING]
    for job in made:
        jobs.planned(job.try_id, bare_plan(job.mm_hash, rows))
    return made


def burst(items: int, encoders: int = 1) -> tuple[EncoderJobTable, list[EncoderJob]]:
    """That many items, all planned at the first encoders; each takes about a second."""
    jobs = EncoderJobTable(1 << 30, model=WorkModel())
    jobs.set_encoders(slots(encoders))
    jobs.spread(0.0)
    for index in range(items):
        jobs.want(f"k{index:04}", f"r{index}", SPACE)
    return jobs, plan_all(jobs)


def where(made: list[EncoderJob]) -> Counter[str]:
    return Counter(job.address for job in made)


def test_a_burst_that_found_one_encoder_is_spread_over_those_that_come() -> None:
    jobs, made = burst(40)
    assert where(made) == {"e0": 40}
    jobs.set_encoders(slots(4))
    ended = jobs.spread(1.0)
    assert len(ended) == 30 == len(set(ended))
    assert all(job.tries == 0 and not job.avoid for job in made)
    plan_all(jobs)
    assert where(made) == {"e0": 10, "e1": 10, "e2": 10, "e3": 10}


def test_the_jobs_that_would_run_first_stay_where_they_are() -> None:
    jobs, made = burst(8)
    for job in made[4:]:
        jobs.admit(next(iter(job.waiters)))
    jobs.set_encoders(slots(2))
    jobs.spread(1.0)
    assert [job for job in made if job.state is JobState.PLANNED] == made[4:]


def test_what_a_tower_works_on_stays() -> None:
    jobs, (job,) = burst(1)
    jobs.admit("r0")
    jobs.pump(0.0)
    assert job.state is JobState.RUNNING
    jobs.set_encoders(slots(8))
    assert jobs.spread(1.0) == [] and job.state is JobState.RUNNING


def test_reports_of_the_try_that_ended_are_ignored() -> None:
    jobs, made = burst(4)
    jobs.set_encoders(slots(2))
    old = jobs.spread(1.0)[0]
    moved = next(job for job in made if job.state is JobState.QUEUED)
    assert old != moved.try_id
    plan = moved.plan
    assert plan is not None and jobs.ready(old, plan) is None and jobs.lost(old, moved.mm_hash, 1.0) is None


def test_nothing_moves_while_no_encoder_comes() -> None:
    jobs, _ = burst(20, encoders=2)
    assert jobs.spread(1.0) == []
    jobs.set_encoders(slots(1))
    assert jobs.spread(1.0) == []


@settings(deadline=None)
@given(items=st.integers(0, 60), before=st.integers(1, 5), after=st.integers(0, 8))
def test_no_encoder_is_left_with_a_whole_job_more_than_another(items: int, before: int, after: int) -> None:
    jobs, made = burst(items, before)
    jobs.set_encoders(slots(before + after))
    jobs.spread(1.0)
    plan_all(jobs)
    assert all(job.state is JobState.PLANNED for job in made)
    counts = where(made)
    held = [counts[f"e{index}"] for index in range(before + after)]
    assert max(held) - min(held) <= 1


def test_a_faster_encoder_that_comes_gets_more_of_the_burst() -> None:
    model = WorkModel()
    model.learn(1, 0.3, "slow")
    model.learn(1, 0.1, "fast")
    jobs = EncoderJobTable(1 << 30, model=model)
    slow, fast = EncoderSlot("s", (SPACE,), 99, 1, "slow"), EncoderSlot("f", (SPACE,), 99, 1, "fast")
    jobs.set_encoders([slow])
    for index in range(40):
        jobs.want(f"k{index:04}", f"r{index}", SPACE)
    made = plan_all(jobs)
    jobs.set_encoders([slow, fast])
    jobs.spread(1.0)
    plan_all(jobs)
    assert where(made) == {"s": 10, "f": 30}


#: The logarithm of the number of jobs, and nothing more, may show.
MAX_GROWTH = 1.5
STEPS = 8


def cost(table: FullTable | PlannedTable, steps: int) -> float:
    return operations(lambda: [table.step() for _ in range(steps)]) / steps


def test_an_item_costs_as_much_among_4096_as_among_16() -> None:
    few, many = cost(FullTable(16), STEPS), cost(FullTable(4096), STEPS)
    assert many < MAX_GROWTH * few


def test_the_admission_and_the_end_of_a_request_cost_as_much_among_4096_planned_items_as_among_16() -> None:
    few, many = cost(PlannedTable(16), 1), cost(PlannedTable(4096), 1)
    assert many < MAX_GROWTH * few


def test_changes_of_a_jobs_rank_leave_nothing_behind() -> None:
    queue, job = JobQueue(), EncoderJob("k", "n", 1)
    for order in range(10_000):
        job.order = order
        queue.push(job, job.rank)
    assert queue.first() == ((True, True, 0, 9_999), job)
    assert len(queue._heap) <= 67
    queue.discard(job)
    assert queue.first() is None


def flooded(credit: int, *, shared: bool = True) -> EncoderJobTable:
    """A table with two encoders, of which alice has what she gets of the plan credit."""
    jobs = EncoderJobTable(1 << 20, shared=lambda: shared)
    jobs.set_encoders(EncoderSlot(name, (SPACE,), credit, credit) for name in ("e1", "e2"))
    for number in range(64):
        jobs.want(f"a{number}", f"alice {number}", SPACE, tenant="alice")
    return jobs


def begun(jobs: EncoderJobTable) -> list[str]:
    return [job.mm_hash for job in jobs.pump(0.0) if job.state is JobState.PLANNING]


@pytest.mark.parametrize(("credit", "share"), [(16, 12), (4, 3), (2, 1)])
def test_one_tenants_jobs_leave_plan_credit_at_each_encoder_to_whoever_comes(credit, share):
    """Its decodes may take half a minute each, and credit comes back with the plan."""
    jobs = flooded(credit)
    assert len(begun(jobs)) == 2 * share
    jobs.want("b", "bob", SPACE, tenant="bob")
    assert begun(jobs) == ["b"]
    # All of it can be used: shares are of what the others leave.
    for number in range(4 * credit):
        jobs.want(f"t{number}", f"request {number}", SPACE, tenant=f"tenant {number}")
    assert len(begun(jobs)) == 2 * credit - 2 * share - 1
    assert begun(jobs) == []


def test_one_tenant_alone_has_all_plan_credit_and_so_has_everybody_without_keys() -> None:
    assert len(begun(flooded(16, shared=False))) == 32
    jobs = EncoderJobTable(1 << 20)
    jobs.set_encoders([EncoderSlot("e1", (SPACE,), 16, 16)])
    for number in range(64):
        jobs.want(f"a{number}", f"{number}", SPACE)
    assert len(begun(jobs)) == 16


def test_re_encodes_of_admitted_requests_need_no_share() -> None:
    jobs = flooded(4)
    assert len(begun(jobs)) == 6
    jobs.want("again", "alice 0", SPACE, tenant="alice", re_encode=True)
    assert begun(jobs) == ["again"]

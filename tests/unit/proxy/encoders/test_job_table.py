from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.data.items import bare_plan
from triptych.proxy.encoders.job import EncoderJob, EncoderSlot, JobState
from triptych.proxy.encoders.job_table import EncoderJobTable
from triptych.proxy.encoders.work_model import WorkModel

SPACE = "n"


def table(share: int = 1 << 20, *slots: EncoderSlot) -> EncoderJobTable:
    made = EncoderJobTable(share)
    made.set_encoders(slots or (EncoderSlot("e1", (SPACE,), 1, 1),))
    return made


def started(jobs: EncoderJobTable, now: float = 0.0) -> list[EncoderJob]:
    return [job for job in jobs.pump(now) if job.state is JobState.PLANNING]


def running(jobs: EncoderJobTable, now: float = 0.0) -> list[EncoderJob]:
    return [job for job in jobs.pump(now) if job.state is JobState.RUNNING]


def planned(jobs: EncoderJobTable, key: str, request: str, rows: int = 1) -> EncoderJob:
    """A job of the request that has its plan."""
    jobs.want(key, request, SPACE)
    (job,) = started(jobs)
    assert jobs.planned(job.try_id, bare_plan(key, rows)) is job
    return job


def test_two_requests_share_one_job() -> None:
    jobs = table()
    first, joined_first = jobs.want("k", "r1", SPACE)
    second, joined_second = jobs.want("k", "r2", SPACE)
    assert first is second
    assert (joined_first, joined_second) == (False, True)
    assert len(started(jobs)) == 1


def test_plan_credit_returns_with_the_plan() -> None:
    jobs = table()
    jobs.want("a", "r", SPACE)
    jobs.want("b", "r", SPACE)
    (first,) = started(jobs)
    assert started(jobs) == []
    jobs.planned(first.try_id, bare_plan(first.mm_hash))
    assert [job.mm_hash for job in started(jobs)] == ["b"]


def test_a_job_runs_only_for_an_admitted_request() -> None:
    jobs = table()
    job = planned(jobs, "a", "r")
    assert running(jobs) == []
    jobs.admit("r")
    assert running(jobs) == [job]


def test_an_early_job_runs_unadmitted_and_its_bytes_count_from_the_admission_on() -> None:
    jobs = table()
    jobs.want("a", "r", SPACE)
    (job,) = started(jobs)
    jobs.planned(job.try_id, bare_plan("a"), early=True)
    assert running(jobs) == [job] and not jobs.published_bytes
    jobs.admit("r")
    assert jobs.published_bytes == bare_plan("a").nbytes
    jobs.ready(job.try_id, bare_plan("a"))
    jobs.loaded("r", "a")
    assert not jobs.published_bytes


def test_an_early_job_that_is_ready_before_the_admission_counts_never() -> None:
    jobs = table()
    jobs.want("a", "r", SPACE)
    (job,) = started(jobs)
    jobs.planned(job.try_id, bare_plan("a"), early=True)
    assert running(jobs) == [job]
    jobs.ready(job.try_id, bare_plan("a"))
    jobs.admit("r")
    assert not jobs.published_bytes and not len(jobs)
    other = planned(jobs, "b", "s")
    jobs.admit("s")
    assert running(jobs) == [other]


def test_jobs_run_in_admission_order_and_re_encodes_first() -> None:
    jobs = table(1 << 20, EncoderSlot("e1", (SPACE,), 9, 1))
    for key, request in (("a", "r1"), ("b", "r2"), ("c", "r3")):
        jobs.want(key, request, SPACE, re_encode=key == "c")
    for job in started(jobs):
        jobs.planned(job.try_id, bare_plan(job.mm_hash))
    for request in ("r2", "r1", "r3"):
        jobs.admit(request)
    order = []
    while runs := running(jobs):
        order += [job.mm_hash for job in runs]
        for job in runs:
            jobs.ready(job.try_id, bare_plan(job.mm_hash))
    assert order == ["c", "b", "a"]


def test_published_bytes_above_the_share_wait_until_an_item_is_loaded() -> None:
    jobs = table(8, EncoderSlot("e1", (SPACE,), 9, 9))
    for key in ("a", "b", "c"):
        jobs.want(key, "r", SPACE)
    for job in started(jobs):
        jobs.planned(job.try_id, bare_plan(job.mm_hash))
    jobs.admit("r")
    first, second = running(jobs)
    assert jobs.published_bytes == 8
    jobs.ready(first.try_id, bare_plan(first.mm_hash))
    assert running(jobs) == []
    jobs.loaded("r", first.mm_hash)
    assert [job.mm_hash for job in running(jobs)] == ["c"]
    assert second.mm_hash == "b"


def test_an_item_above_the_share_runs_alone() -> None:
    jobs = table(4, EncoderSlot("e1", (SPACE,), 9, 9))
    jobs.want("big", "r", SPACE)
    jobs.want("small", "r", SPACE)
    for job in started(jobs):
        jobs.planned(job.try_id, bare_plan(job.mm_hash, 100 if job.mm_hash == "big" else 1))
    jobs.admit("r")
    (big,) = running(jobs)
    assert big.mm_hash == "big"
    jobs.ready(big.try_id, bare_plan("big", 100))
    assert running(jobs) == []
    jobs.loaded("r", "big")
    assert [job.mm_hash for job in running(jobs)] == ["small"]


def test_a_request_that_is_loaded_whole_runs_above_the_share_unless_another_frees_bytes() -> None:
    jobs = table(4, EncoderSlot("e1", (SPACE,), 9, 9))
    jobs.whole_requests = True
    for key, request in (("a", "r1"), ("b", "r1"), ("c", "r2")):
        jobs.want(key, request, SPACE)
    for job in started(jobs):
        jobs.planned(job.try_id, bare_plan(job.mm_hash))
    jobs.admit("r1")
    jobs.admit("r2")
    first, second = running(jobs)
    assert (first.mm_hash, second.mm_hash) == ("a", "b")
    for job in (first, second):
        jobs.ready(job.try_id, bare_plan(job.mm_hash))
    assert running(jobs) == [], "r1 has all that it needs, and loads it"
    jobs.loaded("r1", "a")
    jobs.loaded("r1", "b")
    assert [job.mm_hash for job in running(jobs)] == ["c"]


def test_the_share_returns_at_the_end_of_the_attempt() -> None:
    jobs = table(4)
    job = planned(jobs, "a", "r")
    jobs.admit("r")
    running(jobs)
    jobs.ready(job.try_id, bare_plan("a"))
    assert jobs.published_bytes == 4
    jobs.end_attempt("r")
    assert jobs.published_bytes == 0


def test_an_item_that_the_worker_had_already_holds_no_share_once_published() -> None:
    jobs = table()
    job = planned(jobs, "a", "r")
    jobs.admit("r")
    running(jobs)
    jobs.loaded("r", "a")
    jobs.ready(job.try_id, bare_plan("a"))
    assert jobs.published_bytes == 0


def test_a_job_is_dropped_when_its_last_waiter_leaves() -> None:
    jobs = table()
    job, _ = jobs.want("a", "r1", SPACE)
    jobs.want("a", "r2", SPACE)
    assert jobs.leave("r1") == []
    assert jobs.leave("r2") == [job]
    assert len(jobs) == 0


def test_reports_of_an_old_try_are_ignored() -> None:
    jobs = table()
    jobs.want("a", "r", SPACE)
    (job,) = started(jobs)
    old = job.try_id
    jobs.failed(old, "a", 0.0, retryable=True)
    assert jobs.planned(old, bare_plan("a")) is None
    assert jobs.ready(old, bare_plan("a")) is None
    assert job.state is JobState.QUEUED


def test_a_failed_job_avoids_its_encoder_while_there_is_another() -> None:
    jobs = table(1, EncoderSlot("e1", (SPACE,), 1, 1), EncoderSlot("e2", (SPACE,), 1, 1))
    jobs.want("a", "r", SPACE)
    (job,) = started(jobs)
    first = job.address
    jobs.failed(job.try_id, "a", 5.0, retryable=True)
    started(jobs, 5.0)
    assert {first, job.address} == {"e1", "e2"}


def test_a_lease_owners_job_is_joined_and_its_failure_names_the_token() -> None:
    jobs = table(1, EncoderSlot("e1", (SPACE,), 1, 1), EncoderSlot("e2", (SPACE,), 1, 1))
    jobs.want("a", "r", SPACE)
    (job,) = started(jobs)
    owner = "e2" if job.address == "e1" else "e1"
    jobs.failed(job.try_id, "a", 1.0, retryable=True, owner_address=owner, owner_token="t")
    started(jobs, 1.0)
    assert (job.address, job.failed_lease_token) == (owner, "")
    jobs.failed(job.try_id, "a", 2.0, retryable=True)
    started(jobs, 9.0)
    assert job.failed_lease_token == "t"


def test_a_job_never_goes_to_an_encoder_of_another_namespace() -> None:
    jobs = table(1, EncoderSlot("e1", ("other",), 1, 1))
    jobs.want("a", "r", SPACE)
    assert started(jobs) == []


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("slots", [1, 2])
@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=80, deadline=None)
def test_with_credit_one_and_a_share_of_one_item_every_job_ends(slots: int, whole: bool, seed: int) -> None:
    Simulation(random.Random(seed), slots, whole=whole).run()


class Simulation:
    """Requests with several items arrive, are admitted by room, load, leave; encoders fail now and then.

    Modelled PD room is two items: the table must make progress although little fits anywhere. A `whole`
    engine loads a request's items when all of them are stored.
    """

    ROOM = 4

    def __init__(self, rng: random.Random, slots: int, *, whole: bool) -> None:
        self.rng = rng
        self.jobs = EncoderJobTable(4)
        self.jobs.whole_requests = whole
        self.jobs.set_encoders(EncoderSlot(f"e{i}", (SPACE,), 1, 1) for i in range(slots))
        self.need: dict[str, set[str]] = {}
        self.plans: dict[str, set[str]] = {}
        self.admitted: dict[str, set[str]] = {}
        self.open: dict[str, tuple[EncoderJob, str]] = {}
        self.stored: set[str] = set()
        self.arrivals = 12
        self.now = 0.0

    def run(self) -> None:
        for _ in range(4000):
            self.now += 0.5
            self.step()
            if not self.arrivals and not self.need:
                break
        assert not self.need, "a request is stuck"
        assert len(self.jobs) == 0
        assert self.jobs.published_bytes == 0

    def step(self) -> None:
        if self.arrivals and self.rng.random() < 0.5:
            self.arrive()
        if self.need and not self.jobs.whole_requests and self.rng.random() < 0.05:
            self.leave(self.rng.choice(sorted(self.need)))
        self.pump()
        for try_id in sorted(self.open):
            if try_id in self.open and self.rng.random() < 0.5:
                self.report(try_id)
        self.admit()
        self.load()

    def arrive(self) -> None:
        self.arrivals -= 1
        name = f"r{self.arrivals}"
        self.need[name] = {f"k{self.rng.randrange(5)}" for _ in range(self.rng.randint(1, 4))}
        self.plans[name] = set()
        for key in sorted(self.need[name]):
            self.want(name, key)

    def want(self, name: str, key: str, *, again: bool = False) -> None:
        job, _ = self.jobs.want(key, name, SPACE, re_encode=again)
        if job.plan is not None:
            self.plans[name].add(key)

    def pump(self) -> None:
        for job in self.jobs.pump(self.now):
            self.open[job.try_id] = (job, "plan" if job.state is JobState.PLANNING else "run")

    def report(self, try_id: str) -> None:
        job, stage = self.open.pop(try_id)
        if self.rng.random() < 0.1:
            self.jobs.failed(try_id, job.mm_hash, self.now, retryable=True)
        elif stage == "plan":
            if self.jobs.planned(try_id, bare_plan(job.mm_hash)):
                for name in job.waiters:
                    self.plans[name].add(job.mm_hash)
        elif self.jobs.ready(try_id, bare_plan(job.mm_hash)):
            self.stored.add(job.mm_hash)
            for name in job.waiters:
                self.plans[name].add(job.mm_hash)

    def admit(self) -> None:
        """Requests enter in order while the room of all items of those inside lasts."""
        for name in self.need:
            if name in self.admitted or self.plans[name] < self.need[name]:
                continue
            inside = set().union(*(self.need[other] for other in self.admitted))
            if len(inside | self.need[name]) > self.ROOM:
                return
            self.admitted[name] = set()
            self.jobs.admit(name)

    def load(self) -> None:
        for name in sorted(self.admitted):
            lacking = self.need[name] - self.admitted[name]
            if self.jobs.whole_requests and (absent := lacking - self.stored):
                self.report_missing(name, absent)
                continue
            for key in sorted(lacking):
                if key not in self.stored or self.rng.random() < 0.3:
                    continue
                self.jobs.loaded(name, key)
                if self.rng.random() < 0.1:
                    self.stored.discard(key)
                    self.want(name, key, again=True)
                else:
                    self.admitted[name].add(key)
            if self.admitted[name] == self.need[name]:
                self.leave(name)

    def report_missing(self, name: str, absent: set[str]) -> None:
        """Those that are lost since their jobs ended, as another request has found."""
        for key in sorted(absent):
            job = self.jobs.items.job(key)
            if job is None or name not in job.waiters:
                self.jobs.loaded(name, key)
                self.want(name, key, again=True)

    def leave(self, name: str) -> None:
        for job in self.jobs.leave(name):
            self.open.pop(job.try_id, None)
        for book in (self.need, self.plans, self.admitted):
            book.pop(name, None)  # type: ignore[attr-defined]


def test_without_flow_control_planned_jobs_run_unadmitted_and_above_the_share() -> None:
    jobs = EncoderJobTable(5, flow_control=False)
    jobs.set_encoders([EncoderSlot("e1", (SPACE,), 2, 2)])
    for key in ("a", "b"):
        jobs.want(key, "r", SPACE)
    for job in started(jobs):
        jobs.planned(job.try_id, bare_plan(job.mm_hash, rows=1))
    assert [job.mm_hash for job in running(jobs)] == ["a", "b"]


def test_without_flow_control_what_is_encoded_again_waits_for_what_came_before() -> None:
    jobs = EncoderJobTable(5, flow_control=False)
    jobs.set_encoders([EncoderSlot("e1", (SPACE,), 1, 1)])
    jobs.want("a", "r", SPACE)
    jobs.want("b", "s", SPACE, re_encode=True)
    assert [job.mm_hash for job in started(jobs)] == ["a"]


def test_a_job_whose_only_encoder_fails_it_for_an_hour_waits_longer_and_is_tried_again() -> None:
    jobs, now, waits = table(), 0.0, []
    for request in range(2000):  # each comes before the last one's time is over: the job is never dropped
        jobs.want("k", f"r{request}", SPACE)
        (job,) = started(jobs, now)
        assert jobs.failed(job.try_id, "k", now, retryable=True) is job
        assert started(jobs, now) == []
        waits.append(job.not_before - now)
        now = job.not_before
    assert waits[:7] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])
    assert max(waits) <= 2.0 + 1e-6
    assert started(jobs, now) == [job]


def test_unequal_encoders_get_equal_seconds_of_work_not_equal_numbers_of_items() -> None:
    model = WorkModel()
    for rows in (1, 2, 4):
        model.learn(rows, 0.1 * rows, "fast")
        model.learn(rows, 1.0 * rows, "slow")
    jobs = EncoderJobTable(1 << 20, model=model)
    jobs.set_encoders(
        [EncoderSlot("f", (SPACE,), 999, 1, "fast"), EncoderSlot("s", (SPACE,), 999, 1, "slow")]
    )
    counts: Counter[str] = Counter()
    for index in range(110):
        job, _ = jobs.want(f"{index:064x}", f"r{index}", SPACE)
        jobs.pump(0.0)
        counts[job.kind] += 1
    seconds = {kind: model.work(None, kind) * count for kind, count in counts.items()}
    assert counts["slow"] > 0
    assert abs(seconds["fast"] - seconds["slow"]) <= model.work(None, "slow")


def test_an_idle_slow_encoder_gets_nothing_that_a_fast_one_does_sooner() -> None:
    model = WorkModel()
    model.learn(4, 0.1, "fast")
    model.learn(4, 1.0, "slow")
    jobs = EncoderJobTable(1 << 20, model=model)
    jobs.set_encoders([EncoderSlot("f", (SPACE,), 9, 1, "fast"), EncoderSlot("s", (SPACE,), 9, 1, "slow")])
    for index in range(5):
        jobs.want(f"{index:064x}", "r", SPACE)
    assert {job.address for job in jobs.pump(0.0)} == {"f"}

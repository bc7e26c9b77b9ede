"""The job table's queues decide as a look at all jobs would."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.base.types import ItemPlan
from triptych.proxy.encoders.job import AT_WORK, EncoderJob, EncoderSlot, JobState
from triptych.proxy.encoders.job_table import EncoderJobTable
from triptych.proxy.encoders.work_model import WorkModel
from triptych.proxy.routing import EncoderLoad, PDLoad, Suspects, choose_encoder

SPACES = ("n", "m")
ADDRESSES = ("e1", "e2", "e3", "e4")
#: How long an item takes by kind of worker.
KINDS = {"fast": 1.0, "slow": 7.3}


class PlainTable(EncoderJobTable):
    """Ranks all jobs at every look."""

    model: WorkModel

    def pump(self, now: float) -> list[EncoderJob]:
        self.kept: Suspects[EncoderJob] = Suspects()
        self.kept._losses = self.suspects._losses
        for job in self._jobs:
            if job.suspect and job.state in AT_WORK:
                self.kept.begin(job, job.address)
        ranked = sorted(self._jobs, key=lambda job: job.rank)
        runs = self._all_runs([job for job in ranked if job.state is JobState.PLANNED])
        queued = [job for job in ranked if job.state is JobState.QUEUED]
        return [*runs, *self._all_starts(queued, now)]

    def _all_runs(self, jobs: list[EncoderJob]) -> list[EncoderJob]:
        runs: list[EncoderJob] = []
        for job in jobs:
            slot = self._encoders.get(job.address)
            if (
                not job.admitted
                or slot is None
                or self._at(job.address, JobState.RUNNING) >= slot.tower_credit
            ):
                continue
            if not self._may_begin(job, job.address):
                self._keep(job, [job.address])
                continue
            if self.published_bytes and self.published_bytes + job.plan.nbytes > self.share:
                break
            job.state = JobState.RUNNING
            self._run_turns.begin(job.rank[2], *(self._requesters[each].admission for each in job.admitted))
            self._begun(job)
            self._publish(job)
            runs.append(job)
        return runs

    def _all_starts(self, jobs: list[EncoderJob], now: float) -> list[EncoderJob]:
        started: list[EncoderJob] = []
        for job in jobs:
            if job.not_before > now:
                continue
            able = [slot for slot in self._encoders.values() if job.namespace in slot.namespaces]
            able = [slot for slot in able if job.avoid.get(slot.address, 0.0) <= now] or able
            admitting = [slot for slot in able if self._may_begin(job, slot.address)]
            if not admitting:
                self._keep(job, [slot.address for slot in able])
            address = self._address_for(job, admitting)
            if address is not None:
                job.address, job.state, job.kind = address, JobState.PLANNING, self._encoders[address].kind
                self._plan_turns.begin(job.turn.number, job.turn)
                self._begun(job)
                started.append(job)
        return started

    def _busy(self, address: str) -> int:
        return self._at(address, JobState.PLANNING) + self._at(address, JobState.RUNNING)

    def _may_begin(self, job: EncoderJob, address: str) -> bool:
        return self.kept.admits(address, job) and not (job.suspect and self._busy(address))

    def _keep(self, job: EncoderJob, addresses: list[str]) -> None:
        if job.suspect:
            self.kept.place(job, None, [PDLoad(each, self._busy(each), 1) for each in addresses])

    def _begun(self, job: EncoderJob) -> None:
        if job.suspect:
            self.suspects.begin(job, job.address)
            self.kept.begin(job, job.address)

    def _address_for(self, job: EncoderJob, slots: list[EncoderSlot]) -> str | None:
        free = [slot for slot in slots if self._leaves_credit(job, slot)]
        if job.owner_address in self._encoders:
            return job.owner_address if job.owner_address in [s.address for s in free] else None
        job.owner_address = ""
        loads = [
            EncoderLoad(s.address, self._work_at(s.address, s.kind) + self._work_of(job, s.kind))
            for s in free
        ]
        minimum = min((self._work_of(job, s.kind) for s in free), default=0.0)
        return choose_encoder(loads, job.mm_hash, minimum)

    def _leaves_credit(self, job: EncoderJob, slot: EncoderSlot) -> bool:
        planning = [j for j in self._jobs if j.state is JobState.PLANNING and j.address == slot.address]
        tenant = job.turn.tenant
        own = sum(each.turn.tenant == tenant for each in planning)
        left = slot.plan_credit - len(planning) + own
        shared = bool(tenant) and not job.re_encode
        return len(planning) < slot.plan_credit and (not shared or own < max(1, left - max(1, left // 4)))

    def _at(self, address: str, state: JobState) -> int:
        return sum(job.state is state and job.address == address for job in self._jobs)

    def _work_at(self, address: str, kind: str) -> float:
        at = (j for j in self._jobs if j.state is not JobState.QUEUED and j.address == address)
        return sum(self._work_of(job, kind) for job in at)

    def _work_of(self, job: EncoderJob, kind: str) -> float:
        return self.model.work(None if job.plan is None else job.plan.rows, kind)


class Course:
    """Random events, the same ones for a table of each kind."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.model = WorkModel()
        share = rng.choice((8, 60, 1 << 20))
        self.plain = PlainTable(share, model=self.model)
        self.plain.model = self.model
        self.tables = (EncoderJobTable(share, model=self.model), self.plain)
        self.now = 1.0
        self.kinds: Counter[JobState] = Counter()
        self.set_encoders()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.now += self.rng.choice((0.0, 0.05, 0.7))
            self.event()
            told = [
                [(job.state, job.try_id, job.address) for job in table.pump(self.now)]
                for table in self.tables
            ]
            assert told[0] == told[1]
            self.kinds.update(kind for kind, _, _ in told[0])
            indexed, plain = self.tables
            assert indexed.published_bytes == plain.published_bytes
            assert indexed.waiting == sum(j.state is not JobState.RUNNING for j in indexed._jobs)

    def event(self) -> None:
        rng, jobs = self.rng, list(self.plain._jobs)
        request = f"r{rng.randrange(9)}"
        draw = rng.random()
        if draw < 0.3 or not jobs:
            key, again = f"k{rng.randrange(40)}", rng.random() < 0.1
            space = SPACES[int(key[1:]) % 4 == 0]
            tenant, deadline = f"t{int(request[1:]) % 3}", self.now + rng.choice((5.0, 60.0, 60.0))
            for table in self.tables:
                table.want(key, request, space, tenant=tenant, deadline=deadline, re_encode=again)
            return
        job = rng.choice(jobs)
        if draw < 0.4:
            for table in self.tables:
                table.admit(request)
        elif draw < 0.45:
            for table in self.tables:
                table.end_attempt(request)
        elif draw < 0.48:
            dropped = [[one.mm_hash for one in table.leave(request)] for table in self.tables]
            assert dropped[0] == dropped[1]
        elif draw < 0.55:
            for table in self.tables:
                table.loaded(request, job.mm_hash)
        elif draw < 0.58:
            self.set_encoders()
        else:
            self.report(job)

    def report(self, job: EncoderJob) -> None:
        """Something that the encoder of the job may say now."""
        rng, key, try_id = self.rng, job.mm_hash, job.try_id
        rows = 1 + int(key[1:]) % 7
        plan = ItemPlan(key, job.namespace, "image", rows, 1, "float32", rows)
        if job.state is JobState.QUEUED:
            return
        draw = rng.random()
        if draw < 0.2:
            owner = rng.choice(("", *ADDRESSES))
            for table in self.tables:
                table.failed(try_id, key, self.now, retryable=True, owner_address=owner, owner_token="t")
        elif draw < 0.4:
            for table in self.tables:
                table.lost(try_id, key, self.now)
        elif job.state is JobState.PLANNING:
            for table in self.tables:
                table.planned(try_id, plan)
        elif job.state is JobState.RUNNING:
            self.model.learn(rows, (0.0123 + 0.00171 * rows) * KINDS[job.kind], job.kind)
            for table in self.tables:
                table.ready(try_id, plan)

    def set_encoders(self) -> None:
        rng = self.rng
        slots = [
            EncoderSlot(
                address,
                SPACES[: rng.randint(1, 2)],
                rng.randint(1, 4),
                rng.randint(1, 3),
                rng.choice((*KINDS,)),
            )
            for address in rng.sample(ADDRESSES, rng.randint(0, 4))
        ]
        for table in self.tables:
            table.set_encoders(slots)


@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=25, deadline=None)
def test_jobs_start_in_the_same_order_at_the_same_encoders_as_by_a_look_at_all(seed: int) -> None:
    Course(random.Random(seed)).run(250)

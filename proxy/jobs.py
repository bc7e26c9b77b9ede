"""The table of encoder jobs: single-flight, credits, admission order and the share of published bytes.

Pure: calls are events, `pump` returns what may start now. A job's life:

    QUEUED -plan credit-> PLANNING -planned-> PLANNED -admitted, tower credit, share-> RUNNING -ready-> gone
       ^--------------------------------- a retryable failure ---------------------------------|

The bytes of a run count against the share from its start until an admitted waiter has loaded the item,
reported it missing, or ended its attempt.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from triptych.proxy.isolation import Isolation
from triptych.proxy.routing import EncoderLoad, choose_encoder
from triptych.types import ItemPlan

#: Seconds that a job keeps away from an encoder that failed it, doubled with every failure up to the limit.
FIRST_BACKOFF = 0.1
LAST_BACKOFF = 2.0
#: Encoders that may die while they work on an item. The last one of them works on nothing else.
MAX_LOSSES = 3


class JobState(enum.Enum):
    QUEUED = enum.auto()
    PLANNING = enum.auto()
    PLANNED = enum.auto()
    RUNNING = enum.auto()


#: What an encoder is at: an item that waits there with its plan has nothing to do with its end.
_AT_WORK = (JobState.PLANNING, JobState.RUNNING)


@dataclass(frozen=True, slots=True)
class EncoderSlot:
    """An encoder as the table sees it; credits are this proxy's part."""

    address: str
    namespaces: tuple[str, ...]
    plan_credit: int
    tower_credit: int


@dataclass(slots=True)
class Job:
    """One item on its way into the store. `try_id` is new for every try; reports of old tries are ignored."""

    mm_hash: str
    namespace: str
    order: int
    re_encode: bool = False
    damaged_digest: str = ""
    state: JobState = JobState.QUEUED
    address: str = ""
    tries: int = 0
    #: Encoders that ended while they worked on the item.
    losses: int = 0
    plan: ItemPlan | None = None
    #: Requests that wait for the item.
    waiters: set[str] = field(default_factory=set)
    #: Admission order by request.
    admitted: dict[str, int] = field(default_factory=dict)
    #: An encoder that holds the item's lease: the next try joins it there.
    owner_address: str = ""
    owner_token: str = ""
    #: Token of a lease whose owner failed the item: the next try replaces that lease.
    failed_lease_token: str = ""
    not_before: float = 0.0
    avoid: dict[str, float] = field(default_factory=dict)

    @property
    def try_id(self) -> str:
        return f"{self.mm_hash[:12]}-{self.order}.{self.tries}"

    @property
    def suspect(self) -> bool:
        """Whether one encoder more may be lost to the item, and none after that."""
        return self.losses >= MAX_LOSSES - 1

    @property
    def rank(self) -> tuple[bool, int]:
        """Re-encodes first, then by admission, then by arrival."""
        return (not self.re_encode, min(self.admitted.values(), default=self.order))


@dataclass(frozen=True, slots=True)
class StartJob:
    """Open a stream for the job's current try."""

    job: Job


@dataclass(frozen=True, slots=True)
class RunJob:
    """Permit the tower."""

    job: Job


@dataclass(slots=True)
class _Hold:
    nbytes: int
    holders: set[str]


class JobTable:
    """All jobs of one proxy. `share` is in bytes; `work` gives the seconds expected of a plan.

    Without `flow_control` planned jobs run in the order of their coming, as soon as a tower takes them,
    whoever has room for the result: what the rules are measured against.
    """

    def __init__(
        self,
        share: int,
        work: Callable[[ItemPlan | None], float] = lambda plan: 1.0,
        *,
        flow_control: bool = True,
    ) -> None:
        self.share = share
        self._flow_control = flow_control
        self._work = work
        self._jobs: dict[str, Job] = {}
        self._holds: dict[str, _Hold] = {}
        self._encoders: dict[str, EncoderSlot] = {}
        self._admissions: dict[str, int] = {}
        self._counter = 0

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def published_bytes(self) -> int:
        """Bytes in a tower or in the store that nobody has loaded yet."""
        return sum(hold.nbytes for hold in self._holds.values())

    @property
    def waiting(self) -> int:
        """Jobs that no tower works on."""
        return sum(job.state is not JobState.RUNNING for job in self._jobs.values())

    def get(self, mm_hash: str) -> Job | None:
        return self._jobs.get(mm_hash)

    def set_encoders(self, encoders: Iterable[EncoderSlot]) -> None:
        """The encoders that may get jobs. Jobs on others end by their streams' failure."""
        self._encoders = {slot.address: slot for slot in encoders}

    # -- events ------------------------------------------------------------------------------------

    def want(
        self,
        mm_hash: str,
        request_id: str,
        namespace: str,
        *,
        re_encode: bool = False,
        damaged_digest: str = "",
    ) -> tuple[Job, bool]:
        """The item's job with this request among its waiters, and whether it was there before."""
        job = self._jobs.get(mm_hash)
        joined = job is not None
        if job is None:
            self._counter += 1
            job = Job(mm_hash, namespace, self._counter)
            self._jobs[mm_hash] = job
        job.waiters.add(request_id)
        if re_encode and job.state is not JobState.RUNNING:
            job.re_encode = self._flow_control
            job.damaged_digest = damaged_digest or job.damaged_digest
        if request_id in self._admissions:
            job.admitted[request_id] = self._admissions[request_id]
        return job, joined

    def admit(self, request_id: str) -> None:
        """A PD worker has reserved room for all items of the request."""
        self._counter += 1
        order = self._admissions.setdefault(request_id, self._counter)
        for job in self._jobs.values():
            if request_id in job.waiters:
                job.admitted[request_id] = order
                if job.state is JobState.RUNNING:
                    self._hold(job).holders.add(request_id)

    def loaded(self, request_id: str, mm_hash: str) -> None:
        """An admitted waiter has the item, or knows that the store has not: its bytes count no longer."""
        hold = self._holds.get(mm_hash)
        if hold is None or request_id not in hold.holders:
            return
        job = self._jobs.get(mm_hash)
        if job is not None and job.state is JobState.RUNNING:
            hold.holders.discard(request_id)
        else:
            del self._holds[mm_hash]

    def end_attempt(self, request_id: str) -> None:
        """The request's reservations are gone; its jobs stay."""
        self._admissions.pop(request_id, None)
        for job in self._jobs.values():
            job.admitted.pop(request_id, None)
        for key, hold in list(self._holds.items()):
            hold.holders.discard(request_id)
            if not hold.holders:
                del self._holds[key]

    def leave(self, request_id: str) -> list[Job]:
        """The request has ended. Returns the jobs that nobody waits for any more; they are gone."""
        self.end_attempt(request_id)
        dropped = []
        for job in list(self._jobs.values()):
            job.waiters.discard(request_id)
            if not job.waiters:
                del self._jobs[job.mm_hash]
                dropped.append(job)
        return dropped

    def planned(self, try_id: str, plan: ItemPlan) -> Job | None:
        """Preprocessing is done: the plan credit returns. None for a report of an old try."""
        job = self._current(try_id, plan.mm_hash)
        if job is None or job.state is not JobState.PLANNING:
            return None
        job.plan = plan
        job.state = JobState.PLANNED
        return job

    def ready(self, try_id: str, plan: ItemPlan) -> Job | None:
        """The item is in the store: the job is over, its bytes stay counted while it is held."""
        job = self._current(try_id, plan.mm_hash)
        if job is None:
            return None
        job.plan = plan
        del self._jobs[job.mm_hash]
        hold = self._holds.get(job.mm_hash)
        if hold is not None and not hold.holders:
            del self._holds[job.mm_hash]
        return job

    def failed(
        self,
        try_id: str,
        mm_hash: str,
        now: float,
        *,
        retryable: bool,
        owner_address: str = "",
        owner_token: str = "",
    ) -> Job | None:
        """A try is over without an embedding. A retryable one queues the job again, elsewhere if it can."""
        job = self._current(try_id, mm_hash)
        if job is None:
            return None
        self._holds.pop(mm_hash, None)
        if not retryable:
            del self._jobs[mm_hash]
            return job
        backoff = min(FIRST_BACKOFF * 2**job.tries, LAST_BACKOFF)
        joins = owner_address != job.address and owner_address in self._encoders
        if joins:
            job.not_before = now
        elif owner_address:
            job.not_before = now + backoff
        else:
            job.avoid[job.address] = now + LAST_BACKOFF
            job.not_before = now + (0.0 if self._unblamed(job, now) else backoff)
        if not joins:
            job.failed_lease_token = owner_token or job.owner_token or job.failed_lease_token
        job.owner_address, job.owner_token = (owner_address, owner_token) if joins else ("", "")
        job.state = JobState.QUEUED
        job.tries += 1
        return job

    def lost(self, try_id: str, mm_hash: str, now: float) -> Job | None:
        """The encoder ended without a word. The job is queued again, or gone after MAX_LOSSES of them."""
        job = self._current(try_id, mm_hash)
        if job is None:
            return None
        job.losses += job.state in _AT_WORK
        return self.failed(try_id, mm_hash, now, retryable=job.losses < MAX_LOSSES)

    # -- decisions ---------------------------------------------------------------------------------

    def pump(self, now: float) -> list[StartJob | RunJob]:
        """Everything that may start now, in order; the table counts it as started."""
        planned = self._ranked(JobState.PLANNED)
        queued = self._ranked(JobState.QUEUED)
        if not planned and not queued:
            return []
        at_work = ((job.address, job.suspect) for job in self._jobs.values() if job.state in _AT_WORK)
        isolation = Isolation(at_work)
        runs = self._runs(planned, isolation) if planned else []
        return [*runs, *self._starts(queued, now, isolation)] if queued else runs

    def _starts(self, jobs: list[Job], now: float, isolation: Isolation) -> list[StartJob | RunJob]:
        planning = self._count(JobState.PLANNING)
        work = self._outstanding()
        started: list[StartJob | RunJob] = []
        for job in jobs:
            if job.not_before > now:
                continue
            cost = self._work(job.plan)
            candidates = self._admitting(job, now, isolation)
            address = self._encoder_for(job, candidates, planning, work, cost)
            if address is None:
                continue
            isolation.enter(address, suspect=job.suspect)
            job.address, job.state = address, JobState.PLANNING
            planning[address] = planning.get(address, 0) + 1
            work[address] = work.get(address, 0.0) + cost
            started.append(StartJob(job))
        return started

    def _admitting(self, job: Job, now: float, isolation: Isolation) -> list[EncoderSlot]:
        """Candidates where the job may begin beside those that are there."""
        able = self._candidates(job, now)
        admitting = [slot for slot in able if isolation.admits(slot.address, suspect=job.suspect)]
        if job.suspect and not admitting:
            isolation.keep(slot.address for slot in able)
        return admitting

    def _encoder_for(
        self,
        job: Job,
        candidates: list[EncoderSlot],
        planning: Mapping[str, int],
        work: Mapping[str, float],
        cost: float,
    ) -> str | None:
        free = [slot.address for slot in candidates if planning.get(slot.address, 0) < slot.plan_credit]
        if job.owner_address:
            owner = job.owner_address
            if owner not in self._encoders:
                job.owner_address = ""
            elif owner in free:
                return owner
            else:
                return None
        loads = [EncoderLoad(address, work.get(address, 0.0)) for address in free]
        return choose_encoder(loads, job.mm_hash, cost)

    def _candidates(self, job: Job, now: float) -> list[EncoderSlot]:
        """Encoders of the namespace; those that failed the job only when there is no other."""
        waited = job.not_before and job.not_before <= now
        return self._unblamed(job, now) or (self._able(job) if waited else [])

    def _unblamed(self, job: Job, now: float) -> list[EncoderSlot]:
        return [slot for slot in self._able(job) if job.avoid.get(slot.address, 0.0) <= now]

    def _able(self, job: Job) -> list[EncoderSlot]:
        return [slot for slot in self._encoders.values() if job.namespace in slot.namespaces]

    def _runs(self, jobs: list[Job], isolation: Isolation) -> list[StartJob | RunJob]:
        running = self._count(JobState.RUNNING)
        published = self.published_bytes
        runs: list[StartJob | RunJob] = []
        for job in jobs:
            if self._flow_control and not job.admitted:
                continue
            slot = self._encoders.get(job.address)
            if slot is None or running.get(job.address, 0) >= slot.tower_credit:
                continue
            assert job.plan is not None
            if self._flow_control and published and published + job.plan.nbytes > self.share:
                break  # strict order: smaller items behind must not starve this one
            if not isolation.admits(job.address, suspect=job.suspect):
                if job.suspect:
                    isolation.keep([job.address])
                continue
            isolation.enter(job.address, suspect=job.suspect)
            job.state = JobState.RUNNING
            published += self._hold(job).nbytes
            running[job.address] = running.get(job.address, 0) + 1
            runs.append(RunJob(job))
        return runs

    # -- helpers -----------------------------------------------------------------------------------

    def _hold(self, job: Job) -> _Hold:
        assert job.plan is not None
        hold = self._holds.get(job.mm_hash)
        if hold is None:
            hold = self._holds[job.mm_hash] = _Hold(job.plan.nbytes, set(job.admitted))
        return hold

    def _current(self, try_id: str, mm_hash: str) -> Job | None:
        job = self._jobs.get(mm_hash)
        return job if job is not None and job.try_id == try_id else None

    def _ranked(self, state: JobState) -> list[Job]:
        jobs = [job for job in self._jobs.values() if job.state is state]
        return sorted(jobs, key=lambda job: job.rank)

    def _count(self, state: JobState) -> dict[str, int]:
        counts: dict[str, int] = {}
        for job in self._jobs.values():
            if job.state is state:
                counts[job.address] = counts.get(job.address, 0) + 1
        return counts

    def _outstanding(self) -> dict[str, float]:
        work: dict[str, float] = {}
        for job in self._jobs.values():
            if job.state is not JobState.QUEUED:
                work[job.address] = work.get(job.address, 0.0) + self._work(job.plan)
        return work

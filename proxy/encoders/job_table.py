"""Table of encoder jobs: single-flight, credits, admission order and the share of published bytes.

Without I/O: calls are events, `pump` returns what may start now. A job's states:

    QUEUED -plan credit-> PLANNING -planned-> PLANNED -admitted, tower credit, share-> RUNNING -ready-> gone
       ^--------------------------------- a retryable failure ---------------------------------|

The bytes of a run count against the share from its start until an admitted waiter has loaded the item,
reported it missing, or ended its attempt.
Jobs are filed by what they wait for, so that an event costs what it moves, however many jobs there are.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from triptych.base.types import ItemPlan
from triptych.proxy.encoders.arrivals import Outstanding
from triptych.proxy.encoders.fair_turns import FairTurns
from triptych.proxy.encoders.job import AT_WORK, EncoderJob, EncoderSlot, JobState, PlanKey, Requester, RunKey
from triptych.proxy.encoders.job_files import JobFiles
from triptych.proxy.encoders.known_items import KnownItems
from triptych.proxy.encoders.loads import EncoderLoads, sooner_elsewhere
from triptych.proxy.encoders.work_model import WorkModel
from triptych.proxy.routing import MAX_LOSSES, EncoderLoad, PDLoad, Suspects, choose_encoder


class EncoderJobTable:
    """All encoder jobs of one proxy.

    `share` is in bytes; `patches` of a plan and `model` say what its tower costs; `shared`: by several keys.
    Without `flow_control` planned jobs run in order of arrival as soon as a tower takes them, whether or not
    a PD worker has memory for the result: the baseline that the rules are measured against.
    """

    def __init__(
        self,
        share: int,
        patches: Callable[[ItemPlan], int] = lambda plan: plan.rows,
        model: WorkModel | None = None,
        *,
        flow_control: bool = True,
        shared: Callable[[], bool] = lambda: True,
    ) -> None:
        self.share, self._shared = share, shared
        self._flow_control = flow_control
        #: PD workers load a request's items once all of them are stored, not each as it comes.
        self.whole_requests = False
        self.items = KnownItems()
        self._jobs: dict[EncoderJob, None] = {}
        self._requesters: dict[str, Requester] = {}
        self._plan_turns, self._run_turns = FairTurns(), FairTurns()
        self._counter = 0
        self._encoders: dict[str, EncoderSlot] = {}
        self._by_namespace: dict[str, list[EncoderSlot]] = {}
        #: Encoders have come since the last `spread`.
        self._grown = False
        self._loads = EncoderLoads(patches)
        self.suspects: Suspects[EncoderJob] = Suspects()
        self._model = model or WorkModel()
        self._queued: JobFiles[PlanKey] = JobFiles()
        self._planned: JobFiles[RunKey] = JobFiles()
        #: (when, order, tries, job): a queued job whose try is still this one is then filed again.
        self._timers: list[tuple[float, int, int, EncoderJob]] = []

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def published_bytes(self) -> int:
        """Bytes in a tower or in the store that no PD worker has loaded yet."""
        return self.items.published_bytes

    @property
    def waiting(self) -> int:
        """Jobs that no tower works on."""
        return len(self._jobs) - self._loads.running_jobs

    def outstanding(self, model: str = "") -> Outstanding:
        """What a model's encoders, or all, could work on now: no job whose requests have no memory yet."""
        jobs = self.jobs(model)
        able = (job for job in jobs if job.state is not JobState.PLANNED or self._may_run(job))
        return Outstanding.of((self._loads.patches(job), job.state is not JobState.RUNNING) for job in able)

    def jobs(self, model: str = "") -> list[EncoderJob]:
        return [job for job in self._jobs if model in ("", job.model)]

    def owed(self, address: str) -> tuple[int, int, int]:
        """What an encoder owes this proxy, as `EncoderLoads.owed`."""
        return self._loads.owed(address)

    def set_encoders(self, encoders: Iterable[EncoderSlot]) -> None:
        """The encoders that may get jobs. Jobs on others end by their streams' failure."""
        before = self._encoders.keys()
        self._encoders = {slot.address: slot for slot in encoders}
        self._grown |= bool(self._encoders.keys() - before)
        self._by_namespace = {}
        for slot in self._encoders.values():
            for namespace in slot.namespaces:
                self._by_namespace.setdefault(namespace, []).append(slot)
        self._forget_owners()

    def spread(self, now: float) -> list[str]:
        """Where encoders have come: queues planned jobs again that another encoder would have done sooner,
        the last in order first. Returns the tries that end by it.

        A job keeps its encoder from its plan on. Without this a burst that has found one encoder would stay
        there, however many come.
        """
        if not self._grown:
            return []
        self._grown = False
        moved = []
        waiting = sorted(self._jobs, key=lambda job: job.rank, reverse=True)
        for namespace, able in self._by_namespace.items():
            jobs = [job for job in waiting if job.namespace == namespace and not job.suspect]
            for job in sooner_elsewhere(able, jobs, self._work, self._cost):
                moved.append(job.try_id)
                job.move()
                self._settle(job, now)
        return moved

    def want(
        self,
        mm_hash: str,
        request_id: str,
        namespace: str,
        *,
        tenant: str = "",
        model: str = "",
        deadline: float = math.inf,
        priority: int = 0,
        re_encode: bool = False,
        damaged_digest: str = "",
    ) -> tuple[EncoderJob, bool]:
        """The item's job with this request among its waiters, and whether it was there before."""
        job = self.items.job(mm_hash)
        joined = job is not None
        if job is None:
            self._counter += 1
            turn = self._plan_turns.draw(tenant, mm_hash)
            job = EncoderJob(mm_hash, namespace, self._counter, turn, model)
            self.items.add_job(job)
            self._jobs[job] = None
        requester = self._requesters.setdefault(request_id, Requester())
        requester.tenant, requester.deadline, requester.priority = tenant, deadline, priority
        requester.jobs[job] = None
        job.waiters[request_id] = None
        if re_encode and job.state is not JobState.RUNNING:
            job.re_encode, job.damaged_digest = self._flow_control, damaged_digest or job.damaged_digest
        if requester.admission is not None:
            job.admitted.add(request_id, requester.admission.number)
        for turn in self._plan_turns.hurry(job.turn, deadline, self._cost(job, job.kind), priority):
            if (other := self.items.job(turn.holder)) is not None:
                self._rank_changed(other)
        if joined:
            self._rank_changed(job)
        else:
            self._settle(job, 0.0)
        return job, joined

    def admit(self, request_id: str) -> None:
        """A PD worker has reserved memory for all items of the request."""
        requester = self._requesters.setdefault(request_id, Requester())
        if requester.admission is None:
            requester.admission = self._run_turns.draw(requester.tenant, request_id)
            work = sum(self._cost(job, job.kind) for job in requester.jobs)
            own, deadline, priority = requester.admission, requester.deadline, requester.priority
            for turn in self._run_turns.hurry(own, deadline, work, priority):
                for job in self._requesters[turn.holder].jobs:
                    job.admitted.add(turn.holder, turn.number)
                    self._rank_changed(job)
        for job in requester.jobs:
            job.admitted.add(request_id, requester.admission.number)
            if job.state is JobState.RUNNING:
                self._publish(job)
                self.items.join(job.mm_hash, request_id)
            self._rank_changed(job)
        if all(job.state is JobState.RUNNING for job in requester.jobs):
            self._run_turns.drop(requester.admission)

    def loaded(self, request_id: str, mm_hash: str) -> None:
        """An admitted waiter has loaded the item, or found it missing: its bytes count no longer."""
        if not self.items.loads(mm_hash, request_id):
            return
        job = self.items.job(mm_hash)
        if job is not None and job.state is JobState.RUNNING:
            self.items.leave(mm_hash, request_id)
        else:
            self.items.free(mm_hash)

    def end_attempt(self, request_id: str) -> None:
        """The request's reservations are gone; its jobs stay."""
        if requester := self._requesters.get(request_id):
            self._run_turns.drop(requester.admission)
            requester.admission = None
            for job in requester.jobs:
                if job.admitted.discard(request_id):
                    self._rank_changed(job)
        self.items.end(request_id)

    def leave(self, request_id: str) -> list[EncoderJob]:
        """The request has ended. Removes and returns the jobs that no other request waits for."""
        self.end_attempt(request_id)
        requester = self._requesters.pop(request_id, Requester())
        dropped = []
        for job in requester.jobs:
            job.waiters.pop(request_id, None)
            if not job.waiters:
                self._remove(job)
                self.items.free_unheld(job.mm_hash)
                dropped.append(job)
        return sorted(dropped, key=lambda job: job.order)

    def planned(self, try_id: str, plan: ItemPlan, *, early: bool = False) -> EncoderJob | None:
        """Preprocessing is done: the plan credit returns. None for a report of an old try.

        An `early` job need not wait for admission; its bytes count against the share from then on.
        """
        job = self._current(try_id, plan.mm_hash)
        if job is None or job.state is not JobState.PLANNING:
            return None
        job.plan, job.early = plan, early
        self.items.learn(plan)
        job.state = JobState.PLANNED
        self._settle(job, 0.0)
        return job

    def ready(self, try_id: str, plan: ItemPlan) -> EncoderJob | None:
        """The item is in the store: the job is over, its bytes stay counted while it is held."""
        job = self._current(try_id, plan.mm_hash)
        if job is None:
            return None
        job.plan = plan
        self._remove(job)
        self.items.free_unheld(job.mm_hash)
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
    ) -> EncoderJob | None:
        """A try is over without an embedding. A retryable one queues the job again, elsewhere if it can."""
        job = self._current(try_id, mm_hash)
        if job is None:
            return None
        self.items.free(mm_hash)
        if not retryable:
            self._remove(job)
            return job
        joins = owner_address != job.address and owner_address in self._encoders
        others = {slot.address for slot in self._by_namespace.get(job.namespace, [])} - {job.address}
        elsewhere = any(job.avoid.get(address, 0.0) <= now for address in others)
        job.requeue(now, owner_address, owner_token, joins=joins, elsewhere=elsewhere)
        self._settle(job, now)
        return job

    def lost(self, try_id: str, mm_hash: str, now: float) -> EncoderJob | None:
        """The encoder's process ended. The job is queued again, or gone after MAX_LOSSES of them."""
        job = self._current(try_id, mm_hash)
        if job is None:
            return None
        at_fault = False
        if job.state in AT_WORK:
            at_fault = bool(self.suspects.lost(job.address, "", [job], final=True))
            job.losses = MAX_LOSSES if at_fault else self.suspects.losses(job)
        return self.failed(try_id, mm_hash, now, retryable=not at_fault)

    def pump(self, now: float) -> list[EncoderJob]:
        """Everything that may start now, in order; the table counts it as started. A job that is PLANNING now
        is to get a stream, one that is RUNNING the permission to use the tower."""
        while self._timers and self._timers[0][0] <= now:
            _, _, tries, job = heapq.heappop(self._timers)
            if job.state is JobState.QUEUED and job.tries == tries and job in self._jobs:
                self._settle(job, now)
        if not self._planned and not self._queued:
            return []
        for job in self.suspects.on_trial:
            if job.state not in AT_WORK:
                self.suspects.retreat(job)  # its worker is chosen again, if it still needs one
        return [*self._runs(), *self._starts(now)]

    def _runs(self) -> list[EncoderJob]:
        runs: list[EncoderJob] = []
        items = self.items
        walk = self._planned.walk([key for key in self._planned.all_keys() if self._tower_free(key.address)])
        while (job := walk.first()) is not None:
            if not self._tower_free(job.address):
                walk.skip()
                continue
            if not self._admits(job.address, job):
                self._drain_for(job, [job.address])
                walk.skip()
                continue
            assert job.plan is not None
            published = items.published_bytes
            full = self._flow_control and published and published + job.plan.nbytes > self.share
            if full and self._share_returns():
                break  # strict order: smaller items behind must not starve this one
            job.state = JobState.RUNNING
            if job.admitted or not job.early:
                turns = (self._requesters[each].admission for each in job.admitted)
                self._run_turns.begin(job.rank[2], *turns)
                self._publish(job)
            self._settle(job, 0.0)
            runs.append(job)
        return runs

    def _share_returns(self) -> bool:
        """Whether published bytes are loaded without another run: where whole requests are loaded, one of
        those that have still to load must wait for no further item."""
        return not self.whole_requests or any(
            all(job.state is JobState.RUNNING for job in self._requesters[each].jobs)
            for each in self.items.loaders
        )

    def _starts(self, now: float) -> list[EncoderJob]:
        started: list[EncoderJob] = []
        if not self._queued or not any(map(self._plan_free, self._encoders.values())):
            return started
        walk = self._queued.walk(self._queued.all_keys())
        while (job := walk.first()) is not None:
            address = self._encoder_for(job, now)
            if address is None:
                walk.skip()
                continue
            job.address, job.state = address, JobState.PLANNING
            job.kind = self._encoders[address].kind
            self._plan_turns.begin(job.turn.number, job.turn)
            self._settle(job, now)
            started.append(job)
        return started

    def _encoder_for(self, job: EncoderJob, now: float) -> str | None:
        able = self._by_namespace.get(job.namespace, [])
        # Encoders that failed the job only when there is no other.
        able = [slot for slot in able if job.avoid.get(slot.address, 0.0) <= now] or able
        admitting = [slot for slot in able if self._admits(slot.address, job)]
        if not admitting:
            self._drain_for(job, [slot.address for slot in able])
        free = [slot for slot in admitting if self._plan_free(slot, job.plan_key.tenant)]
        if job.owner_address:
            return job.owner_address if any(slot.address == job.owner_address for slot in free) else None
        if not free:
            return None
        costs = {kind: self._cost(job, kind) for kind in dict.fromkeys(slot.kind for slot in free)}
        loads = [
            EncoderLoad(slot.address, self._work(slot.address, slot.kind) + costs[slot.kind]) for slot in free
        ]
        return choose_encoder(loads, job.mm_hash, min(costs.values()))

    def _admits(self, address: str, job: EncoderJob) -> bool:
        """Whether the job may begin there: a suspect alone, and nothing beside a suspect."""
        return self.suspects.admits(address, job) and not (job.suspect and self._loads.busy(address))

    def _drain_for(self, job: EncoderJob, addresses: Iterable[str]) -> None:
        """Nothing begins at one of these encoders before the suspect."""
        if job.suspect:
            loads = [PDLoad(address, self._loads.busy(address), 1) for address in addresses]
            self.suspects.place(job, None, loads)

    def _forget_owners(self) -> None:
        """Jobs that would join an encoder which has gone start anywhere."""
        for key in self._queued.all_keys():
            if key.owner and key.owner not in self._encoders:
                for job in self._queued.jobs(key):
                    job.owner_address = ""
                    self._queued.file(job, replace(key, owner=""), job.rank)

    def _tower_free(self, address: str) -> bool:
        slot = self._encoders.get(address)
        return slot is not None and self._loads.running(address) < slot.tower_credit

    def _plan_free(self, slot: EncoderSlot, tenant: str = "") -> bool:
        used = self._loads.planning(slot.address)
        if not tenant or not self._shared():
            return used < slot.plan_credit
        own = self._loads.planning_of(slot.address, tenant)
        return used < slot.plan_credit and own < slot.share(used - own)

    def _work(self, address: str, kind: str) -> float:
        """Seconds of tower time that the encoder, of this kind, still owes this proxy."""
        return self._model.total(*self._loads.owed(address), kind)

    def _cost(self, job: EncoderJob, kind: str) -> float:
        """Seconds of tower time expected of the job at an encoder of this kind."""
        return self._model.work(self._loads.patches(job), kind)

    def _may_run(self, job: EncoderJob) -> bool:
        return bool(job.admitted or job.early or not self._flow_control)

    def _settle(self, job: EncoderJob, now: float) -> None:
        """Counts the job at its encoder and files it by what it waits for."""
        self._loads.count(job)
        if job.suspect and job.state in AT_WORK:
            self.suspects.begin(job, job.address)
        self._queued.discard(job)
        self._planned.discard(job)
        if job.state is JobState.PLANNED:
            if self._may_run(job):
                self._planned.file(job, job.run_key, job.rank)
        elif job.state is JobState.QUEUED:
            job.avoid = {address: until for address, until in job.avoid.items() if until > now}
            for when in [job.not_before] if job.not_before > now else list(job.avoid.values()):
                heapq.heappush(self._timers, (when, job.order, job.tries, job))
            if job.not_before <= now:
                self._queued.file(job, job.plan_key, job.rank)

    def _rank_changed(self, job: EncoderJob) -> None:
        """The job's waiters, or their admissions, have changed."""
        if job.state is JobState.PLANNED:
            self._settle(job, 0.0)
        else:
            self._queued.renew(job, job.rank)

    def _remove(self, job: EncoderJob) -> None:
        """The job is gone; what it has published counts on."""
        del self._jobs[job]
        self.items.remove_job(job)
        self.suspects.forget(job)
        self._plan_turns.drop(job.turn)
        self._loads.remove(job)
        self._queued.discard(job)
        self._planned.discard(job)
        for request_id in job.waiters:
            if requester := self._requesters.get(request_id):
                requester.jobs.pop(job, None)
                if not requester.jobs:
                    self._run_turns.drop(requester.admission)

    def _publish(self, job: EncoderJob) -> None:
        assert job.plan is not None
        self.items.publish(job.mm_hash, job.plan.nbytes, list(job.admitted))

    def _current(self, try_id: str, mm_hash: str) -> EncoderJob | None:
        job = self.items.job(mm_hash)
        return job if job is not None and job.try_id == try_id else None

"""Loads of encoders: what each owes this proxy, and the jobs that another one would have done sooner."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from triptych.base.types import ItemPlan
from triptych.proxy.encoders.job import EncoderJob, EncoderSlot, JobState


@dataclass(frozen=True, slots=True)
class _Counted:
    """How a job is counted."""

    address: str
    state: JobState
    tenant: str
    #: None while its plan is not known.
    patches: int | None


@dataclass(slots=True)
class _Sums:
    jobs: int = 0
    planning: int = 0
    #: Of each tenant.
    planning_of: Counter[str] = field(default_factory=Counter)
    running: int = 0
    #: Jobs without a plan, and the patches of all others: whole numbers, so that sums stay exact.
    unknown: int = 0
    patches: int = 0


_NOTHING = _Sums()


class EncoderLoads:
    """Sums by encoder, kept up to date job by job. `patches` is the size that a tower's time grows with."""

    def __init__(self, patches: Callable[[ItemPlan], int]) -> None:
        self._patches = patches
        self._entries: dict[EncoderJob, _Counted] = {}
        self._loads: dict[str, _Sums] = {}
        self.running_jobs = 0

    def planning(self, address: str) -> int:
        return self._loads.get(address, _NOTHING).planning

    def planning_of(self, address: str, tenant: str) -> int:
        return self._loads.get(address, _NOTHING).planning_of[tenant]

    def running(self, address: str) -> int:
        return self._loads.get(address, _NOTHING).running

    def busy(self, address: str) -> int:
        """Jobs in preprocessing or in the tower."""
        return self.planning(address) + self.running(address)

    def owed(self, address: str) -> tuple[int, int, int]:
        """What the encoder still owes this proxy: jobs without a plan, jobs with one, and their patches."""
        load = self._loads.get(address, _NOTHING)
        return load.unknown, load.jobs - load.unknown, load.patches

    def patches(self, job: EncoderJob) -> int | None:
        """The job's size; None while its plan is not known."""
        return None if job.plan is None else self._patches(job.plan)

    def count(self, job: EncoderJob) -> None:
        """Counts the job where it stands now, and nowhere else."""
        self.remove(job)
        if job.state is JobState.QUEUED:
            return
        entry = self._entries[job] = _Counted(job.address, job.state, job.turn.tenant, self.patches(job))
        self._add(self._loads.setdefault(job.address, _Sums()), entry, 1)

    def remove(self, job: EncoderJob) -> None:
        """The job is at no encoder. Idempotent."""
        entry = self._entries.pop(job, None)
        if entry is None:
            return
        load = self._loads[entry.address]
        self._add(load, entry, -1)
        if not load.jobs:
            del self._loads[entry.address]

    def _add(self, load: _Sums, entry: _Counted, sign: int) -> None:
        load.jobs += sign
        load.planning += sign * (entry.state is JobState.PLANNING)
        if entry.state is JobState.PLANNING:
            load.planning_of[entry.tenant] += sign
            if not load.planning_of[entry.tenant]:
                del load.planning_of[entry.tenant]
        load.running += sign * (entry.state is JobState.RUNNING)
        self.running_jobs += sign * (entry.state is JobState.RUNNING)
        if entry.patches is None:
            load.unknown += sign
        else:
            load.patches += sign * entry.patches


def tower_patches(plan: ItemPlan) -> int:
    """Size that a tower's time grows with: patches of a picture or video, rows of anything else."""
    return math.prod(plan.grid_thw) if plan.grid_thw and plan.modality != "audio" else plan.rows


def sooner_elsewhere(
    able: Sequence[EncoderSlot],
    jobs: Iterable[EncoderJob],
    work: Callable[[str, str], float],
    cost: Callable[[EncoderJob, str], float],
) -> list[EncoderJob]:
    """The planned jobs that another encoder would have done sooner, were those before them moved.

    In seconds of tower time: `work` of an address and its kind, `cost` of a job at a kind.
    """
    owed = {slot.address: work(slot.address, slot.kind) for slot in able}
    kinds: dict[str, list[str]] = {}
    for slot in able:
        kinds.setdefault(slot.kind, []).append(slot.address)
    moved = []
    for job in jobs:
        if job.state is not JobState.PLANNED:
            continue
        costs = {min(addresses, key=owed.__getitem__): cost(job, kind) for kind, addresses in kinds.items()}
        best = min(costs, key=lambda address: owed[address] + costs[address])
        if owed[best] + costs[best] < owed.get(job.address, 0.0) * (1.0 - 1e-9):
            owed[best] += costs[best]
            owed[job.address] -= cost(job, job.kind)
            moved.append(job)
    return moved

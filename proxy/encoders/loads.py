"""Loads of the encoders with this proxy's jobs: jobs by stage, outstanding work, suspects."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from triptych.proxy.encoders.job import AT_WORK, EncoderJob, EncoderSlot, JobState
from triptych.proxy.encoders.outstanding import OutstandingItems
from triptych.proxy.encoders.work_model import WorkModel
from triptych.types import ItemPlan


class EncoderIsolation:
    """Keeps a suspect, an item that may have ended its encoders, alone at its encoder: no other item is
    suspected for that one.

    Counts the jobs in preprocessing or in a tower at every encoder, and the suspects among them.
    """

    def __init__(self) -> None:
        self._busy: Counter[str] = Counter()
        self._suspects: Counter[str] = Counter()
        self._kept: set[str] = set()

    def begin(self) -> None:
        """Starts another pass over all jobs: nothing is kept for a suspect yet."""
        self._kept.clear()

    def admits(self, address: str, *, suspect: bool) -> bool:
        """Whether the job may begin there now."""
        return not self._closed(address) and not (suspect and self._busy[address])

    def enter(self, address: str, *, suspect: bool) -> None:
        """The job has begun there."""
        self._busy[address] += 1
        self._suspects[address] += suspect

    def leave(self, address: str, *, suspect: bool) -> None:
        """The job is not worked on there any more."""
        self._busy[address] -= 1
        self._suspects[address] -= suspect
        if not self._busy[address]:
            del self._busy[address], self._suspects[address]

    def keep(self, addresses: Iterable[str]) -> None:
        """Lets the emptiest of these drain for a suspect: nothing begins there before it."""
        free = [address for address in addresses if not self._closed(address)]
        if free:
            self._kept.add(min(free, key=lambda address: (self._busy[address], address)))

    def _closed(self, address: str) -> bool:
        return address in self._kept or self._suspects[address] > 0


@dataclass(frozen=True, slots=True)
class _Counted:
    """How a job is counted."""

    address: str
    state: JobState
    suspect: bool
    #: None while its plan is not known.
    patches: int | None


@dataclass(slots=True)
class _Sums:
    jobs: int = 0
    planning: int = 0
    running: int = 0
    #: Jobs without a plan, and the patches of all others: whole numbers, so that sums stay exact.
    unknown: int = 0
    patches: int = 0


_NOTHING = _Sums()


class EncoderLoads:
    """Sums by encoder and of all, kept up to date job by job.

    `patches` is the size that a tower's time grows with. With `flow_control` a planned job waits for its
    admission, and is not outstanding until then: no further encoder would help it.
    """

    def __init__(
        self, patches: Callable[[ItemPlan], int], model: WorkModel, *, flow_control: bool = True
    ) -> None:
        self.isolation = EncoderIsolation()
        self.outstanding = OutstandingItems()
        self._flow_control = flow_control
        self._patches = patches
        self._model = model
        self._entries: dict[EncoderJob, _Counted] = {}
        self._loads: dict[str, _Sums] = {}
        self.running_jobs = 0

    def planning(self, address: str) -> int:
        return self._loads.get(address, _NOTHING).planning

    def running(self, address: str) -> int:
        return self._loads.get(address, _NOTHING).running

    def work(self, address: str, kind: str) -> float:
        """Seconds of tower time that the encoder, of this kind, still owes this proxy."""
        load = self._loads.get(address, _NOTHING)
        return self._model.total(load.unknown, load.jobs - load.unknown, load.patches, kind)

    def cost(self, job: EncoderJob, kind: str) -> float:
        """Seconds of tower time expected of the job at an encoder of this kind."""
        return self._model.work(self._patches(job.plan) if job.plan is not None else None, kind)

    def sooner_elsewhere(self, able: Sequence[EncoderSlot], jobs: Iterable[EncoderJob]) -> list[EncoderJob]:
        """The planned ones of these jobs that another encoder would have done sooner, were those before them
        moved."""
        work = {slot.address: self.work(slot.address, slot.kind) for slot in able}
        kinds: dict[str, list[str]] = {}
        for slot in able:
            kinds.setdefault(slot.kind, []).append(slot.address)
        moved = []
        for job in jobs:
            if job.state is not JobState.PLANNED:
                continue
            costs = {
                min(addresses, key=work.__getitem__): self.cost(job, kind)
                for kind, addresses in kinds.items()
            }
            best = min(costs, key=lambda address: work[address] + costs[address])
            if work[best] + costs[best] < work.get(job.address, 0.0) * (1.0 - 1e-9):
                work[best] += costs[best]
                work[job.address] -= self.cost(job, job.kind)
                moved.append(job)
        return moved

    def count(self, job: EncoderJob) -> None:
        """Counts the job where it stands now, and nowhere else."""
        self.remove(job)
        patches = None if job.plan is None else self._patches(job.plan)
        if job.state is not JobState.PLANNED or job.admitted or not self._flow_control:
            self.outstanding.count(job, patches)
        if job.state is JobState.QUEUED:
            return
        entry = self._entries[job] = _Counted(job.address, job.state, job.suspect, patches)
        self._add(self._loads.setdefault(job.address, _Sums()), entry, 1)
        if entry.state in AT_WORK:
            self.isolation.enter(entry.address, suspect=entry.suspect)

    def remove(self, job: EncoderJob) -> None:
        """The job is at no encoder. Idempotent."""
        self.outstanding.remove(job)
        entry = self._entries.pop(job, None)
        if entry is None:
            return
        load = self._loads[entry.address]
        self._add(load, entry, -1)
        if not load.jobs:
            del self._loads[entry.address]
        if entry.state in AT_WORK:
            self.isolation.leave(entry.address, suspect=entry.suspect)

    def _add(self, load: _Sums, entry: _Counted, sign: int) -> None:
        load.jobs += sign
        load.planning += sign * (entry.state is JobState.PLANNING)
        load.running += sign * (entry.state is JobState.RUNNING)
        self.running_jobs += sign * (entry.state is JobState.RUNNING)
        if entry.patches is None:
            load.unknown += sign
        else:
            load.patches += sign * entry.patches


def tower_patches(plan: ItemPlan) -> int:
    """Size that a tower's time grows with: patches of a picture, rows of anything else."""
    return math.prod(plan.grid_thw) if plan.grid_thw and plan.modality == "image" else plan.rows

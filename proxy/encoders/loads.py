"""What every encoder has of this proxy's jobs: how many in which stage, and their outstanding work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from triptych.proxy.encoders.isolation import Isolation
from triptych.proxy.encoders.job import AT_WORK, Job, JobState
from triptych.proxy.routing import WorkModel
from triptych.types import ItemPlan


@dataclass(frozen=True, slots=True)
class _Entry:
    """How a job is counted."""

    address: str
    state: JobState
    suspect: bool
    #: None while its plan is not known.
    patches: int | None


@dataclass(slots=True)
class _Load:
    jobs: int = 0
    planning: int = 0
    running: int = 0
    #: Jobs without a plan, and the patches of all others: whole numbers, so that sums stay exact.
    unknown: int = 0
    patches: int = 0


_NOTHING = _Load()


class EncoderLoads:
    """Sums by encoder, kept up to date job by job. `patches` says what a tower's time goes with."""

    def __init__(self, patches: Callable[[ItemPlan], int], model: WorkModel) -> None:
        self.isolation = Isolation()
        self._patches = patches
        self._model = model
        self._entries: dict[Job, _Entry] = {}
        self._loads: dict[str, _Load] = {}
        self.running_jobs = 0

    def planning(self, address: str) -> int:
        return self._loads.get(address, _NOTHING).planning

    def running(self, address: str) -> int:
        return self._loads.get(address, _NOTHING).running

    def work(self, address: str) -> float:
        """Seconds of tower time that the encoder still owes this proxy."""
        load = self._loads.get(address, _NOTHING)
        return self._model.total(load.unknown, load.jobs - load.unknown, load.patches)

    def cost(self, job: Job) -> float:
        """Seconds of tower time expected of the job."""
        return self._model.work(self._patches(job.plan) if job.plan is not None else None)

    def count(self, job: Job) -> None:
        """Counts the job where it stands now, and nowhere else."""
        self.remove(job)
        if job.state is JobState.QUEUED:
            return
        patches = None if job.plan is None else self._patches(job.plan)
        entry = self._entries[job] = _Entry(job.address, job.state, job.suspect, patches)
        self._add(self._loads.setdefault(job.address, _Load()), entry, 1)
        if entry.state in AT_WORK:
            self.isolation.enter(entry.address, suspect=entry.suspect)

    def remove(self, job: Job) -> None:
        """The job is at no encoder. Idempotent."""
        entry = self._entries.pop(job, None)
        if entry is None:
            return
        load = self._loads[entry.address]
        self._add(load, entry, -1)
        if not load.jobs:
            del self._loads[entry.address]
        if entry.state in AT_WORK:
            self.isolation.leave(entry.address, suspect=entry.suspect)

    def _add(self, load: _Load, entry: _Entry, sign: int) -> None:
        load.jobs += sign
        load.planning += sign * (entry.state is JobState.PLANNING)
        load.running += sign * (entry.state is JobState.RUNNING)
        self.running_jobs += sign * (entry.state is JobState.RUNNING)
        if entry.patches is None:
            load.unknown += sign
        else:
            load.patches += sign * entry.patches

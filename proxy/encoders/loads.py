"""Loads of encoder jobs: what each encoder owes, what there is to do, what arrives, and what moves."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from triptych.base.types import ItemPlan
from triptych.proxy.encoders.job import EncoderJob, EncoderSlot, JobState


@dataclass(frozen=True, slots=True)
class _Counted:
    """How a job is counted."""

    address: str
    state: JobState
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
    """Sums by encoder, kept up to date job by job. `patches` is the size that a tower's time grows with."""

    def __init__(self, patches: Callable[[ItemPlan], int]) -> None:
        self._patches = patches
        self._entries: dict[EncoderJob, _Counted] = {}
        self._loads: dict[str, _Sums] = {}
        self.running_jobs = 0

    def planning(self, address: str) -> int:
        return self._loads.get(address, _NOTHING).planning

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
        entry = self._entries[job] = _Counted(job.address, job.state, self.patches(job))
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
        load.running += sign * (entry.state is JobState.RUNNING)
        self.running_jobs += sign * (entry.state is JobState.RUNNING)
        if entry.patches is None:
            load.unknown += sign
        else:
            load.patches += sign * entry.patches


def tower_patches(plan: ItemPlan) -> int:
    """Size that a tower's time grows with: patches of a picture or video, rows of anything else."""
    return math.prod(plan.grid_thw) if plan.grid_thw and plan.modality != "audio" else plan.rows


#: Seconds over which arrivals are averaged.
FAST_SECONDS = 6.0
SLOW_SECONDS = 60.0
#: Items that an average may fall to before it is none: it would never be zero.
_NONE_LEFT = 0.05


@dataclass(slots=True)
class Items:
    """A number of items by what is known of them: those without a plan, and the others with their patches."""

    unknown: float = 0.0
    known: float = 0.0
    patches: float = 0.0

    def add(self, weight: float, patches: int | None) -> None:
        if patches is None:
            self.unknown += weight
        else:
            self.known += weight
            self.patches += weight * patches

    def scale(self, factor: float) -> None:
        self.unknown *= factor
        self.known *= factor
        self.patches *= factor


class OutstandingItems:
    """The jobs that encoders could work on now, re-encodes included. Each event costs a constant, or the
    logarithm of their sizes."""

    def __init__(self) -> None:
        self.items = Items()
        #: Of these, jobs that no tower works on.
        self.waiting = 0
        self._entries: dict[EncoderJob, tuple[bool, int | None]] = {}
        self._sizes: Counter[int] = Counter()
        #: Sizes, negative; those that `_sizes` has no more are dropped when they come to the top.
        self._heap: list[int] = []

    def count(self, job: EncoderJob, patches: int | None) -> None:
        """Counts the job as it stands now, and no more as it stood."""
        self.remove(job)
        waits = job.state is not JobState.RUNNING
        self._entries[job] = (waits, patches)
        self.items.add(1.0, patches)
        self.waiting += waits
        if patches is not None:
            if not self._sizes[patches]:
                heapq.heappush(self._heap, -patches)
            self._sizes[patches] += 1

    def remove(self, job: EncoderJob) -> None:
        """Idempotent."""
        entry = self._entries.pop(job, None)
        if entry is None:
            return
        waits, patches = entry
        self.items.add(-1.0, patches)
        self.waiting -= waits
        if patches is not None:
            self._sizes[patches] -= 1
            if not self._sizes[patches]:
                del self._sizes[patches]

    @property
    def largest(self) -> int | None:
        """Patches of the largest one; None while no plan is known."""
        while self._heap and -self._heap[0] not in self._sizes:
            heapq.heappop(self._heap)
        return -self._heap[0] if self._heap else None


class _Average:
    """Items that arrived in the last seconds, of which those longer ago count less."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._items = Items()
        self._at = 0.0

    def add(self, now: float, weight: float, patches: int | None) -> None:
        self._advance(now)
        self._items.add(weight, patches)

    def resize(self, now: float, arrived: float, patches: int) -> None:
        """Corrects the patches of an item that has arrived, once they are known."""
        self._advance(now)
        weight = math.exp(-max(now - arrived, 0.0) / self.seconds)
        self._items.add(-weight, None)
        self._items.add(weight, patches)

    def rate(self, now: float) -> Items:
        """Items for each second."""
        self._advance(now)
        items = self._items
        if items.unknown + items.known < _NONE_LEFT:
            return Items()
        share = 1.0 / self.seconds
        return Items(max(items.unknown, 0.0) * share, max(items.known, 0.0) * share, items.patches * share)

    def _advance(self, now: float) -> None:
        if now > self._at:
            self._items.scale(math.exp(-(now - self._at) / self.seconds))
            self._at = now


class ArrivedItems:
    """The rate at which items arrive that no cache and no job has, over some seconds and over a minute."""

    def __init__(self) -> None:
        self._fast, self._slow = _Average(FAST_SECONDS), _Average(SLOW_SECONDS)

    def add(self, job: EncoderJob, now: float) -> None:
        """A new job, which is no re-encode."""
        job.arrived = now
        for average in (self._fast, self._slow):
            average.add(now, 1.0, None)

    def resize(self, job: EncoderJob, patches: int, now: float) -> None:
        """The job's size is known."""
        if job.arrived is not None:
            for average in (self._fast, self._slow):
                average.resize(now, job.arrived, patches)
            job.arrived = None

    def rates(self, now: float) -> tuple[Items, Items]:
        """Items for each second, by the fast and by the slow average."""
        return self._fast.rate(now), self._slow.rate(now)


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

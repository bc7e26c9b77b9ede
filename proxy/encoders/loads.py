"""Outstanding work: items at encoders, prompts at PD workers, the seconds they take, and what arrives."""

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

    def include(self, other: Items) -> None:
        self.unknown += other.unknown
        self.known += other.known
        self.patches += other.patches

    def scale(self, factor: float) -> None:
        self.unknown *= factor
        self.known *= factor
        self.patches *= factor


@dataclass(slots=True)
class Outstanding:
    """Items that workers could work on now. None works yet on `waiting` of them; `largest` is the size of the
    largest one, None while no size is known."""

    items: Items = field(default_factory=Items)
    waiting: int = 0
    largest: int | None = None

    @classmethod
    def of(cls, items: Iterable[tuple[int | None, bool]]) -> Outstanding:
        """Of each item its size, None while it is not known, and whether it waits."""
        load = cls()
        for patches, waits in items:
            load.items.add(1.0, patches)
            load.waiting += waits
            if patches is not None:
                load.largest = max(load.largest or 0, patches)
        return load


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
        #: Items since the start.
        self.total = 0

    def add(self, job: EncoderJob, now: float) -> None:
        """A new job, which is no re-encode."""
        job.arrived = now
        self.count(None, now)

    def count(self, patches: int | None, now: float) -> None:
        """An item of this size, None where its size is not known yet."""
        self.total += 1
        for average in (self._fast, self._slow):
            average.add(now, 1.0, patches)

    def resize(self, job: EncoderJob, patches: int, now: float) -> None:
        """The job's size is known."""
        if job.arrived is not None:
            for average in (self._fast, self._slow):
                average.resize(now, job.arrived, patches)
            job.arrived = None

    def rates(self, now: float) -> tuple[Items, Items]:
        """Items for each second, by the fast and by the slow average."""
        return self._fast.rate(now), self._slow.rate(now)


class Arrivals:
    """The items that arrive, of each model by itself."""

    def __init__(self) -> None:
        self._models: dict[str, ArrivedItems] = {}

    def of(self, model: str) -> ArrivedItems:
        """Those of one model, which is served here."""
        return self._models.setdefault(model, ArrivedItems())

    def total(self, model: str = "") -> int:
        """Items of a model, or of all, since the start."""
        return sum(one.total for name, one in self._models.items() if model in ("", name))

    def rates(self, now: float, model: str = "") -> tuple[Items, Items]:
        """Items of a model, or of all, for each second: by the fast and by the slow average."""
        fast, slow = Items(), Items()
        for name, arrived in self._models.items():
            if model in ("", name):
                for total, rate in zip((fast, slow), arrived.rates(now), strict=True):
                    total.include(rate)
        return fast, slow


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


#: Seconds that any item is expected to take, whatever the fit says of small ones.
MIN_WORK = 1e-4
#: Kinds that costs are kept for; of more, those that reported longest ago are forgotten.
MAX_KINDS = 64


@dataclass(frozen=True, slots=True)
class CostLine:
    """Seconds by patches as a line: through an average item, with `slope` seconds for a patch more."""

    patches: float
    seconds: float
    slope: float

    def at(self, patches: float) -> float:
        return self.seconds + self.slope * (patches - self.patches)


#: While nothing is known: a second for any item.
_UNKNOWN = CostLine(0.0, 1.0, 0.0)


class _Fit:
    """Least squares of a kind's reports, of which old ones count less and less."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def learn(self, patches: int, seconds: float) -> None:
        x, decay = float(patches), self._decay
        self._n = self._n * decay + 1.0
        self._x = self._x * decay + x
        self._y = self._y * decay + seconds
        self._xx = self._xx * decay + x * x
        self._xy = self._xy * decay + x * seconds

    def line(self) -> CostLine | None:
        """None while all items had one size: their slope is not known."""
        mean = self.mean()
        spread = self._xx / self._n - mean.patches * mean.patches
        if spread <= 1e-9 * max(mean.patches * mean.patches, 1.0):
            return None
        slope = (self._xy / self._n - mean.patches * mean.seconds) / spread
        return CostLine(mean.patches, mean.seconds, max(slope, 0.0))

    def mean(self) -> CostLine:
        """A flat line through the average item."""
        return CostLine(self._x / self._n, self._y / self._n, 0.0)


class WorkModel:
    """Seconds of an encoder job as a + b·patches, for each kind of worker from what its towers report.

    A kind that has not reported costs what the known ones cost on average. One whose items were all of one
    size has the slope of that average, scaled by how its items compare.
    """

    def __init__(self, decay: float = 0.98) -> None:
        self._decay = decay
        #: By kind, the one that reported last at the end.
        self._fits: dict[str, _Fit] = {}
        #: Lines as last asked for, until the next report.
        self._lines: dict[str, CostLine] = {}

    @property
    def kinds(self) -> list[str]:
        """Those that have reported."""
        return list(self._fits)

    def learn(self, patches: int, seconds: float, kind: str = "") -> None:
        """A worker of the kind had an item of this size in its tower for `seconds`; nonsense is ignored."""
        if not (math.isfinite(seconds) and seconds > 0.0 and patches >= 0):
            return
        fit = self._fits.pop(kind, None) or _Fit(self._decay)
        fit.learn(patches, seconds)
        self._fits[kind] = fit
        if len(self._fits) > MAX_KINDS:
            del self._fits[next(iter(self._fits))]
        self._lines.clear()

    def work(self, patches: int | None, kind: str = "") -> float:
        """Seconds expected of an item; of an average one when its patches are not known yet."""
        line = self.line(kind)
        return max(line.seconds if patches is None else line.at(patches), MIN_WORK)

    def total(self, unknown: float, known: float, patches: float, kind: str = "") -> float:
        """Seconds expected of `unknown` items without a plan and of `known` ones with `patches` together."""
        line = self.line(kind)
        planned = known * line.seconds + line.slope * (patches - known * line.patches)
        return unknown * max(line.seconds, MIN_WORK) + max(planned, known * MIN_WORK)

    def speed(self, kind: str, reference: str) -> float:
        """How much faster a worker of `kind` is than one of `reference`, on an average item."""
        ours, theirs = self.line(kind), self.line(reference)
        patches = theirs.patches
        return max(theirs.at(patches), MIN_WORK) / max(ours.at(patches), MIN_WORK)

    def line(self, kind: str) -> CostLine:
        """Seconds by patches of this kind, as far as they are known."""
        line = self._lines.get(kind)
        if line is None:
            line = self._lines[kind] = self._line(kind)
            if len(self._lines) > 2 * MAX_KINDS:
                self._lines = {kind: line}
        return line

    def _line(self, kind: str) -> CostLine:
        fit = self._fits.get(kind)
        own = fit.line() if fit is not None else None
        if own is not None:
            return own
        others = self._average(kind)
        if fit is None:
            return others or _UNKNOWN
        mean = fit.mean()
        if others is None:
            return mean
        ratio = mean.seconds / max(others.at(mean.patches), MIN_WORK)
        return CostLine(mean.patches, mean.seconds, others.slope * ratio)

    def _average(self, kind: str) -> CostLine | None:
        """The mean of the other kinds' lines; None where there is no other."""
        known = [fit.line() or fit.mean() for name, fit in self._fits.items() if name != kind]
        if not known:
            return None
        patches = sum(line.patches for line in known) / len(known)
        seconds = sum(line.at(patches) for line in known) / len(known)
        return CostLine(patches, seconds, sum(line.slope for line in known) / len(known))

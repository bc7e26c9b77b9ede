"""Outstanding and arriving items of one proxy's encoder jobs: whole sums, so that nothing walks the jobs."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass

from triptych.proxy.encoders.job import EncoderJob, JobState

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
        """An item that arrived then turns out to have so many patches."""
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

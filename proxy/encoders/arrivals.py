"""Items and prompts in numbers: what is outstanding at workers, and at what rate more arrive."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from triptych.proxy.encoders.job import EncoderJob

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

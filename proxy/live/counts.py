"""Counts of one proxy since its start, read from its metrics once a second, and their change in a window."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from prometheus_client import Counter

from triptych.metrics import ProxyMetrics

#: Seconds that a window may reach back.
MOST_SECONDS = 60
_OVERLOADED = "429"


class Counts(NamedTuple):
    """Totals at a moment of the proxy's clock; differences of two of them say what happened between."""

    at: float = 0.0
    requests: float = 0.0
    errors: float = 0.0
    refused: float = 0.0
    items: float = 0.0
    hits: float = 0.0
    tokens: float = 0.0
    met: float = 0.0
    measured: float = 0.0

    def since(self, before: Counts) -> Counts:
        """What has been added since then; `at` is the seconds between."""
        return Counts(*(after - earlier for after, earlier in zip(self, before, strict=True)))

    @property
    def hit_rate(self) -> float | None:
        return self.hits / self.items if self.items else None

    @property
    def met_share(self) -> float | None:
        return self.met / self.measured if self.measured else None

    def rate(self, total: float) -> float:
        """So many, per second."""
        return total / self.at if self.at > 0 else 0.0


def read_counts(metrics: ProxyMetrics, at: float, tokens: float, met: int, measured: int) -> Counts:
    """The totals now. An item that was not "encoded" for its request needed no encoder job of its own."""
    statuses, origins = _by_label(metrics.requests), _by_label(metrics.items)
    errors = sum(count for status, count in statuses.items() if status >= "500" or status == _OVERLOADED)
    # 499 is a client that has left, which is no refusal.
    refused = sum(n for status, n in statuses.items() if "400" <= status < "499" and status != _OVERLOADED)
    items = sum(origins.values())
    return Counts(
        at=at,
        requests=sum(statuses.values()),
        errors=errors,
        refused=refused,
        items=items,
        hits=items - origins.get("encoded", 0.0),
        tokens=tokens,
        met=met,
        measured=measured,
    )


def _by_label(counter: Counter) -> dict[str, float]:
    """The values of a counter, summed by its first label."""
    sums: dict[str, float] = {}
    for family in counter.collect():
        for sample in family.samples:
            label = next(iter(sample.labels.values()))
            sums[label] = sums.get(label, 0.0) + sample.value
    return sums


class CountWindow:
    """The totals of the last minute, one for each second."""

    def __init__(self) -> None:
        self._seen: deque[Counts] = deque(maxlen=MOST_SECONDS + 1)

    def add(self, counts: Counts) -> None:
        self._seen.append(counts)

    def last(self, seconds: int) -> Counts:
        """What was added over so many seconds, or since the first look; nothing before the second one."""
        if len(self._seen) < 2:
            return Counts()
        return self._seen[-1].since(self._seen[max(len(self._seen) - 1 - seconds, 0)])

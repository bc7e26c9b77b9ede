"""Service level objectives, as `vllm bench serve --goodput` writes them: `ttft:500 tpot:50 e2el:8000`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from triptych.errors import ConfigError

#: Time to first token, time per output token after it, end-to-end latency.
METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in milliseconds by metric; a request is good when it meets all of them."""

    limits: tuple[tuple[str, float], ...] = ()

    def seconds(self, metric: str) -> float:
        """The metric's limit; infinite when it has none."""
        return dict(self.limits).get(metric, math.inf) / 1000

    def __str__(self) -> str:
        return " ".join(f"{name}:{limit:g}" for name, limit in self.limits)

    def misses(self, latencies: Mapping[str, float]) -> tuple[str, ...]:
        """The metrics over their limits. `latencies` are in seconds and hold all of METRICS."""
        return tuple(name for name, limit in self.limits if latencies[name] > limit / 1000)


def parse_slo(words: Iterable[str]) -> Slo:
    """ConfigError for what is no `metric:milliseconds`. Words may hold several, apart by spaces or commas."""
    limits: dict[str, float] = {}
    for word in " ".join(words).replace(",", " ").split():
        name, colon, value = word.partition(":")
        if name not in METRICS or not colon:
            raise ConfigError(
                f"--slo {word!r} is no objective: write {', '.join(METRICS)} like ttft:500, in ms"
            )
        if name in limits:
            raise ConfigError(f"--slo names {name} twice")
        limits[name] = _milliseconds(word, value)
    return Slo(tuple(limits.items()))


def _milliseconds(word: str, value: str) -> float:
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        raise ConfigError(f"--slo {word!r} has no positive number of milliseconds")
    return limit

"""Goodput of one proxy: the calls of the last minute against the SLO."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from triptych.proxy.live.objects import ClusterGoodput

WINDOW_SECONDS = 60.0
#: Calls whose times are kept for percentiles; with more in a minute those are of the newest ones.
MOST_CALLS = 4096


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds: to the first token, and for each one after it."""

    ttft: float
    tpot: float


class _EndedCall(NamedTuple):
    at: float
    ttft: float
    #: None with fewer than two tokens.
    tpot: float | None


class GoodputWindow:
    """Calls that have ended. `met` and `measured` count all since the start."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._calls: deque[_EndedCall] = deque(maxlen=MOST_CALLS)
        self.met = 0
        self.measured = 0

    def answered(self, at: float, ttft: float, seconds: float, tokens: int) -> None:
        """A call was answered with so many tokens, `seconds` after its arrival."""
        tpot = (seconds - ttft) / (tokens - 1) if tokens > 1 else None
        self._calls.append(_EndedCall(at, ttft, tpot))
        self.measured += 1
        self.met += ttft <= self._slo.ttft and (tpot is None or tpot <= self._slo.tpot)

    def failed(self) -> None:
        """A call has failed through no fault of its client."""
        self.measured += 1

    def read(self, now: float, met: float | None) -> ClusterGoodput:
        """The window's times; `met` is the share of it that met the SLO."""
        while self._calls and self._calls[0].at < now - WINDOW_SECONDS:
            self._calls.popleft()
        first = sorted(call.ttft for call in self._calls)
        later = sorted(call.tpot for call in self._calls if call.tpot is not None)
        return ClusterGoodput(
            ttft_slo=self._slo.ttft,
            tpot_slo=self._slo.tpot,
            met=None if met is None else round(met, 4),
            **_percentiles("ttft", first),
            **_percentiles("tpot", later),
        )


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    return {f"{name}_p{percent}": percentile(values, percent) for percent in (50, 99)}


def percentile(ordered: Sequence[float], percent: int) -> float | None:
    """The least value that so many percent do not exceed; None of nothing."""
    if not ordered:
        return None
    return round(ordered[max(-(-len(ordered) * percent // 100) - 1, 0)], 6)


def mean(values: Iterable[float]) -> float | None:
    """None of nothing."""
    found = list(values)
    return sum(found) / len(found) if found else None

"""History of the cluster: 12 numbers every 5 seconds for 15 minutes, in a ring."""

from __future__ import annotations

from collections import deque

import msgspec

from triptych.proxy.live.objects import ClusterHistory, ClusterSeries

STEP_SECONDS = 5
POINTS = 180


class HistoryPoint(msgspec.Struct, frozen=True):
    """One value of each series of `ClusterSeries`, in its order; None where nothing is known."""

    in_flight: float | None = None
    queued: float | None = None
    requests: float | None = None
    tokens: float | None = None
    items: float | None = None
    errors: float | None = None
    hit_rate: float | None = None
    met: float | None = None
    encoders: float | None = None
    desired_encoders: float | None = None
    pd_workers: float | None = None
    kv_usage: float | None = None


_BEFORE = HistoryPoint()


class HistoryRing:
    """The newest points."""

    def __init__(self) -> None:
        self._points: deque[HistoryPoint] = deque([_BEFORE] * POINTS, maxlen=POINTS)
        self._end = 0.0

    def add(self, point: HistoryPoint, time: float) -> None:
        self._points.append(point)
        self._end = time

    def read(self) -> ClusterHistory:
        names = ClusterSeries.__struct_fields__
        series = {name: [_rounded(getattr(point, name)) for point in self._points] for name in names}
        return ClusterHistory(STEP_SECONDS, round(self._end, 3), ClusterSeries(**series))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)

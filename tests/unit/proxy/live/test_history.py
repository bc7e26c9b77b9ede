"""The history: a fixed number of points, the newest last."""

from __future__ import annotations

import msgspec

from triptych.proxy.live.history import POINTS, STEP_SECONDS, HistoryPoint, HistoryRing
from triptych.proxy.live.objects import ClusterSeries


def test_the_points_are_fifteen_minutes_of_every_series() -> None:
    read = HistoryRing().read()
    assert STEP_SECONDS * POINTS == 15 * 60
    series = msgspec.to_builtins(read.series)
    assert [len(values) for values in series.values()] == [POINTS] * len(ClusterSeries.__struct_fields__)


def test_a_point_has_a_value_for_every_series() -> None:
    assert HistoryPoint.__struct_fields__ == ClusterSeries.__struct_fields__


def test_the_time_before_the_start_is_unknown_and_the_newest_point_is_last() -> None:
    ring = HistoryRing()
    ring.add(HistoryPoint(in_flight=3, kv_usage=0.25), 100.0)
    read = ring.read()
    assert read.end == 100.0
    assert read.series.in_flight[-2:] == [None, 3]
    assert read.series.kv_usage[-1] == 0.25
    assert read.series.met[-1] is None


def test_the_oldest_points_leave_the_ring() -> None:
    ring = HistoryRing()
    for index in range(POINTS + 7):
        ring.add(HistoryPoint(in_flight=index), float(index))
    read = ring.read()
    assert read.series.in_flight == list(range(7, POINTS + 7))
    assert read.end == POINTS + 6

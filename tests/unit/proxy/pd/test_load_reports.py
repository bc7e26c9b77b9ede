"""The load that a PD worker reports with its beats."""

from __future__ import annotations

import pytest

from triptych.protos import pd_pb2
from triptych.proxy.pd.beats import FRESH_SECONDS, LoadReports


def beat(tokens: int = 0, **given: float) -> pd_pb2.Beat:
    load = pd_pb2.PDLoad(running=3, waiting=2, kv_usage=0.5, cache_usage=0.25, generated_tokens=tokens)
    for name, value in given.items():
        setattr(load, name, value)
    return pd_pb2.Beat(count=1, patience=1.0, load=load)


def test_the_newest_report_is_kept() -> None:
    reports = LoadReports()
    assert reports.latest(0.0) is None
    reports.observe(beat(), 10.0)
    found = reports.latest(10.5)
    assert found is not None
    assert (found.running, found.waiting, found.kv_usage, found.cache_usage) == (3, 2, 0.5, 0.25)
    assert found.tokens_per_second == 0.0


def test_tokens_of_a_second_come_from_two_reports() -> None:
    reports = LoadReports()
    reports.observe(beat(100), 10.0)
    reports.observe(beat(400), 12.0)
    found = reports.latest(12.0)
    assert found is not None and found.tokens_per_second == 150.0


def test_a_process_that_was_started_anew_has_made_no_negative_tokens() -> None:
    reports = LoadReports()
    reports.observe(beat(100), 10.0)
    reports.observe(beat(7), 11.0)
    found = reports.latest(11.0)
    assert found is not None and found.tokens_per_second == 0.0


def test_a_beat_without_a_load_is_of_an_earlier_release() -> None:
    reports = LoadReports()
    reports.observe(pd_pb2.Beat(count=1, patience=1.0), 10.0)
    assert reports.latest(10.0) is None


def test_an_old_report_says_nothing() -> None:
    reports = LoadReports()
    reports.observe(beat(), 10.0)
    assert reports.latest(10.0 + FRESH_SECONDS) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 7.0])
def test_shares_lie_between_0_and_1_whatever_a_worker_sends(value: float) -> None:
    reports = LoadReports()
    reports.observe(beat(kv_usage=value, cache_usage=value), 10.0)
    found = reports.latest(10.0)
    assert found is not None
    assert 0.0 <= found.kv_usage <= 1.0 and 0.0 <= found.cache_usage <= 1.0

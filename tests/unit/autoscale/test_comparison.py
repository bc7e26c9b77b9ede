"""Figures of trials: kept, drawn."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.autoscale.comparison import (
    OURS,
    POLICIES,
    SLO,
    STATIC,
    TrialFigures,
    figures_of,
    kept,
    trials,
)
from benchmarks.autoscale.plot import save
from triptych.errors import ConfigError
from triptych.goodput.load.job import RequestRecord
from triptych.simulator.autoscale.pool import PoolHistory, PoolMoment, TrialResult, WorkerLife
from triptych.simulator.autoscale.traces import TRACES, trace


def figures(policy: str) -> TrialFigures:
    timeline = ((0.0, 1, 1, 1), (100.0, 4, 1, 4), (105.0, 4, 4, 4))
    return TrialFigures("burst", policy, 5.0, 100, 99, 90, 0, 3.0, 2400.0, 4800.0, 2, 0, timeline)


def test_every_policy_meets_every_trace_and_cold_start_and_a_static_pool_only_one() -> None:
    found = trials()
    assert len(found) == len(set(found)) == len(TRACES) * (2 * len(POLICIES) - 1)


def test_figures_count_what_met_the_objectives_and_keep_the_changes_of_the_pool() -> None:
    def record(index: int, ttft: float, error: str = "") -> RequestRecord:
        return RequestRecord(index, 0.0, 0.0, ttft=ttft, e2e=ttft, error=error)

    sizes = [(1, 1), (1, 1), (3, 1), (3, 3), (2, 2)]
    moments = [PoolMoment(float(now), wanted, ready, wanted) for now, (wanted, ready) in enumerate(sizes)]
    life = WorkerLife("e0", 0.0, ready=0.0, ended=30.0)
    records = [record(0, 1.0), record(1, 7.0), record(2, 12.0), record(3, 1.0, "timeout")]
    found = figures_of(
        "x", OURS, 5.0, TrialResult(records, PoolHistory([life], moments), 40.0, {"jobs": 0}, SLO)
    )
    assert (found.requests, found.good, found.strict, found.failures) == (4, 2, 1, 1)
    assert (found.worker_seconds, found.direction_changes, found.leftovers) == (30.0, 1, 0)
    assert [now for now, *_ in found.timeline] == [0.0, 2.0, 3.0, 4.0]


def test_a_trial_that_is_kept_is_not_measured_again(tmp_path: Path) -> None:
    (tmp_path / "burst-static-peak-5-0.json").write_bytes(msgspec.json.encode(figures(STATIC)))
    assert kept(tmp_path, ("burst", STATIC, 5.0)) == figures(STATIC)


def test_a_file_that_holds_no_trial_is_refused(tmp_path: Path) -> None:
    (tmp_path / "burst-static-peak-5-0.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no trial"):
        kept(tmp_path, ("burst", STATIC, 5.0))


def test_the_workers_of_every_policy_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "burst.png"
    save(trace("burst"), [figures(policy) for policy in POLICIES], path)
    assert path.read_bytes().startswith(b"\x89PNG")

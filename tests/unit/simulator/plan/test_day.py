"""`triptych plan --trace`: a day with the scaling policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.simulated import COSTS, LIMITS, MODEL, PICTURE
from triptych.base.errors import ConfigError
from triptych.goodput.measure.slo import Slo
from triptych.simulator.plan.day import DayPlan, day_of, read_trace
from triptych.simulator.plan.question import PlannedDevice, Question

#: Pictures of half a second, so that a few requests per second need several encoders.
SLOW = replace(COSTS, encoder=replace(COSTS.encoder, tower_batch=0.5))
QUESTION = Question(
    workload=PICTURE,
    workload_name="picture",
    slo=Slo((("ttft", 10_000.0),)),
    device=PlannedDevice("round", SLOW, MODEL, LIMITS, 2.0),
)


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "day.txt"
    path.write_text("# seconds share\n90 0.05\n1 0.05\n15 1.0\n1 1.0\n90 0.05\n")
    return path


def day(path: Path, question: Question = QUESTION, rate: float = 4.0) -> DayPlan:
    return day_of(question, rate, str(path))


@pytest.fixture(scope="module")
def found(trace_file: Path) -> DayPlan:
    return day(trace_file)


def test_the_policy_costs_less_than_the_pool_for_the_peak(found: DayPlan) -> None:
    static, best, quick, slow = found.rows
    assert (static.name, static.encoders) == ("static peak", 3)
    assert static.good == found.requests and not any(row.failures for row in found.rows)
    assert best.encoders <= static.encoders and best.good >= 0.99 * static.good
    assert quick.worker_seconds < 0.8 * static.worker_seconds and quick.good >= 0.99 * static.good
    assert slow.name == "policy, cold start 60 s"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10\n", 'line 1: write "seconds share"'),
        ("\n10 many\n", 'line 2: write "seconds share"'),
        ("0 0.5\n", "seconds must be above 0"),
        ("10 1.5\n", "between 0 and 1"),
        ("nan 0.5\n", "seconds must be above 0"),
        ("10 0\n", "has no load"),
    ],
)
def test_a_file_that_holds_no_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "day.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(str(path), PICTURE)

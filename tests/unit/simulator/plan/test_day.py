"""`triptych plan --trace`: a day with the scaling policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from support.simulated import COSTS, LIMITS, MODEL, PICTURE
from triptych.apps.cli.commands.plan import plan
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


def test_dollars_are_those_of_24_hours_of_encoders(found: DayPlan) -> None:
    static, _, quick, _ = found.rows
    assert static.dollars == pytest.approx(3 * 24 * 2.0)
    assert quick.dollars == pytest.approx(144 * quick.worker_seconds / static.worker_seconds)


def test_a_file_is_read_as_phases_up_to_the_next_share(trace_file: Path) -> None:
    shown = read_trace(str(trace_file), PICTURE)
    assert [(phase.seconds, phase.begin, phase.end) for phase in shown.phases] == [
        (90, 0.05, 0.05),
        (1, 0.05, 1.0),
        (15, 1.0, 1.0),
        (1, 1.0, 0.05),
        (90, 0.05, 0.05),
    ]
    assert {phase.workload for phase in read_trace("diurnal", PICTURE).phases} == {PICTURE}


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


def test_what_cannot_be_simulated_is_refused(trace_file: Path) -> None:
    with pytest.raises(ConfigError, match="--trace needs --rate"):
        day(trace_file, rate=0.0)
    with pytest.raises(ConfigError, match="use a --rate of up to"):
        day(trace_file, rate=10_000.0)
    with pytest.raises(ConfigError, match="no pictures: give --images"):
        day(trace_file, replace(QUESTION, workload=replace(PICTURE, images=((0, 1.0),))))
    with pytest.raises(ConfigError, match="--slo is empty"):
        day(trace_file, replace(QUESTION, slo=Slo()))
    with pytest.raises(ConfigError, match="use one of diurnal, burst, step, or a file"):
        day(Path("nowhere"))


def test_the_command_prints_the_pools_of_a_day(trace_file: Path) -> None:
    options = ["--workload", "image", "--images", "4", "--gpu", "cpu", "--rate", "0.8", "--slo", "ttft:10000"]
    result = CliRunner().invoke(plan, [*options, "--trace", str(trace_file)])
    assert result.exit_code == 0, result.output
    for words in ("static peak", "static, best size", "policy, cold start 5 s", "a day"):
        assert words in result.output

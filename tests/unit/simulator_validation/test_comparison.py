"""Which cells there are, and when a simulation is near enough. Plain values."""

from __future__ import annotations

import pytest

from benchmarks.simulator_validation.comparison import (
    SYSTEMS,
    Comparison,
    compare,
    plan_cells,
    systems_for,
    table,
)
from triptych.goodput.launch import parse_shape


def runs(*values: float) -> list[dict[str, float]]:
    return [{"ttft": value} for value in values]


def test_every_system_stands_for_the_same_workers_on_both_sides() -> None:
    for system in SYSTEMS:
        started, simulated = parse_shape(system.launch), system.shape
        assert (started.encoding, started.decoding) == (simulated.encoders, simulated.pd_workers), system.name


def test_systems_need_a_core_for_each_worker() -> None:
    assert [system.name for system in systems_for(2)] == ["1e1pd-pinned", "1-colocated"]
    assert systems_for(4) == SYSTEMS


def test_systems_take_turns_and_closed_windows_come_before_open_ones_whose_rate_they_give() -> None:
    names = [cell.name for cell in plan_cells(["a", "b"], ["mix"], 2)]
    first = ["a.mix.closed.0", "a.mix.open.0", "b.mix.closed.0", "b.mix.open.0"]
    assert names == [*first, *(name.replace("0", "1") for name in first)]


def test_medians_are_compared() -> None:
    found = compare("ttft", runs(0.9, 1.0, 5.0), runs(1.1, 0.2, 9.0))
    assert (found.measured, found.simulated) == (1.0, 1.1)
    assert found.error == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("spread", "simulated", "passed"),
    [(0.01, 1.14, True), (0.01, 0.84, False), (0.4, 1.39, True), (0.4, 1.41, False)],
)
def test_a_simulation_may_be_off_by_15_percent_or_by_the_measured_spread(
    spread: float, simulated: float, passed: bool
) -> None:
    assert Comparison("ttft", 1.0, spread, simulated).passed is passed


def test_the_spread_is_how_far_the_farthest_run_is_from_the_median() -> None:
    assert compare("ttft", runs(0.8, 1.0, 1.1), runs(1.0)).spread == pytest.approx(0.2)


def test_a_comparison_without_measured_runs_is_an_error() -> None:
    with pytest.raises(ValueError, match="ttft"):
        compare("ttft", [], runs(1.0))


def test_the_table_marks_figures_that_are_off() -> None:
    text = table(
        {("1e1pd", "mix", "open"): [Comparison("ttft", 0.1, 0.0, 0.1), Comparison("tpot", 0.1, 0, 0.2)]}
    )
    assert "| 1e1pd | mix | open | ttft | 100 ms | 0% | 100 ms | 0% | 15% | ok |" in text
    assert "| tpot | 100 ms | 0% | 200 ms | 100% | 15% | OFF |" in text
    assert "1 of 2 within" in text

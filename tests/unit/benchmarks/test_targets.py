"""Targets: what is met, what is missed, and figures that are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.targets import TARGETS, Bound, Reached, Target, read, verdict

SPEED = Target("speed", (Bound("req/s", "≥", 1.1), Bound("TTFT", "≤", 1.0)), "speed")


def reached(**figures: float) -> Reached:
    names = {"rate": "req/s", "ttft": "TTFT"}
    return Reached({names[key]: value for key, value in figures.items()}, "2026-11-23", "abc", "chip", "a.md")


@pytest.mark.parametrize(
    ("figures", "word"),
    [
        ({"rate": 1.1, "ttft": 1.0}, "met"),
        ({"rate": 1.09, "ttft": 0.5}, "missed"),
        ({"rate": 2.0, "ttft": 1.01}, "missed"),
        ({"rate": 0.5}, "missed"),
        ({"rate": 2.0}, "not measured"),
        ({}, "not measured"),
    ],
)
def test_a_target_is_met_when_every_figure_is_and_missed_when_one_is_not(figures, word):
    assert verdict(SPEED, reached(**figures)) == word


def test_the_committed_figures_are_those_of_targets_and_pages_that_are_there() -> None:
    results = Path(__file__).parents[3] / "benchmarks" / "results"
    bounds = {target.name: {bound.figure for bound in target.bounds} for target in TARGETS}
    for name, found in read().items():
        assert set(found.figures) <= bounds[name], name
        assert (results / found.page).exists(), name

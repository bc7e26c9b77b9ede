"""Targets: what is met, what is missed, and figures that are kept."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.__main__ import names
from benchmarks.targets import TARGETS, Bound, Reached, Target, read, record, table, verdict
from triptych.base.errors import ConfigError

SPEED = Target("speed", (Bound("req/s", "≥", 1.1), Bound("TTFT", "≤", 1.0)), "speed")
NAME = "vLLM, small, text@16"


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
def test_a_target_is_met_when_every_figure_is_and_missed_when_one_is_not(
    figures: dict[str, float], word: str
) -> None:
    assert verdict(SPEED, reached(**figures)) == word


def test_a_figure_without_a_limit_is_neither_met_nor_missed() -> None:
    shown = Target("cost", (Bound("req/s"),), "cost")
    assert verdict(shown, reached(rate=3.0)) == "–"
    assert verdict(shown, None) == "not measured"


def test_every_target_has_a_name_of_its_own_and_a_line() -> None:
    assert len({target.name for target in TARGETS}) == len(TARGETS)
    lines = table({}).splitlines()
    assert len(lines) == len(TARGETS) + 2
    assert all(target.name in line for target, line in zip(TARGETS, lines[1:], strict=False))


def test_every_target_is_measured_by_a_benchmark_that_there_is() -> None:
    for target in TARGETS:
        module, *words = target.command.split()
        there = words[0] in names() if module == "benchmarks" else find_spec(module) is not None
        assert there, target.command


def test_figures_are_kept_beside_those_of_other_targets(tmp_path: Path) -> None:
    path, page = tmp_path / "targets.json", Path("page.md")
    record(NAME, {"req/s": 0.5, "TTFT": 2.0, "TPOT": 1.234567}, page, made_at="abc", path=path)
    record("proxy, of gRPC receive alone", {"tokens/s": 0.62}, page, path=path)
    record(NAME, {"req/s": 1.2, "TTFT": 0.9, "TPOT": 0.99999}, page, made_at="def", path=path)
    found = read(path)
    assert found[NAME].figures == {"req/s": 1.2, "TTFT": 0.9, "TPOT": 1.0}
    assert (found[NAME].commit, found[NAME].page, len(found)) == ("def", "page.md", 2)
    row = next(line for line in table(found).splitlines() if line.startswith(NAME))
    assert "1.2, 0.9, 1" in row and " met " in row
    assert "1 met, 1 missed" in table(found).splitlines()[-1]


def test_a_figure_that_a_target_does_not_have_is_refused_and_a_load_without_a_target_left_out(
    tmp_path: Path,
) -> None:
    path = tmp_path / "targets.json"
    with pytest.raises(ConfigError, match="goodput"):
        record(NAME, {"goodput": 1.0}, Path("page.md"), path=path)
    record("vLLM, small, reuse-50@1", {"req/s": 1.0}, Path("page.md"), path=path)
    assert not path.exists() or read(path) == {}


def test_the_committed_figures_are_those_of_targets_and_pages_that_are_there() -> None:
    results = Path(__file__).parents[3] / "benchmarks" / "results"
    bounds = {target.name: {bound.figure for bound in target.bounds} for target in TARGETS}
    for name, found in read().items():
        assert set(found.figures) <= bounds[name], name
        assert (results / found.page).exists(), name

"""Baselines: the order of cells, the rates that finished cells give, and what the report says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.baselines.cell import Cell, CellFiles, plan_cells, read_folder
from benchmarks.baselines.cell_results import CellResults, comparisons
from benchmarks.baselines.matrix import Matrix, read_matrix
from benchmarks.baselines.measure import fixed_rate, search_start
from benchmarks.baselines.tables import report
from triptych.base.errors import ConfigError
from triptych.base.types import JsonObject

MATRIX = """
name = "made-up"
model = "${MODEL_FOLDER}"
repeats = 2
loads = {mix = "ttft:500 tpot:25", images-4 = "ttft:2000 tpot:50"}
system = [{name = "colocated", launch = "2colocated"}, {name = "epd-shared", launch = "2E1PD"}]
cells = [
  {kind = "capacity", loads = ["mix", "images-4"], systems = ["colocated"]},
  {kind = "fixed", loads = ["mix"], systems = ["colocated", "epd-shared"]},
  {kind = "search", loads = ["images-4"], systems = ["colocated", "epd-shared"]},
]
"""


def matrix(tmp_path: Path, text: str = MATRIX) -> Matrix:
    path = tmp_path / "matrix.toml"
    path.write_text(text)
    return read_matrix(path, {"MODEL_FOLDER": "/models/made-up"})


def found(name: str, *, rate: float = 0.0, tpot: float = 10.0, failed: int = 0, **more: Any) -> JsonObject:
    """A finished cell, with as much of a window as rates and the report read."""
    kind, load, system, repeat = name.split(".")
    window = {
        "request_throughput": rate, "request_goodput": rate, "slo_attainment": 1.0, "sustained": not failed,
        "num_prompts": 100, "completed": 100, "failed": failed, "total_input_tokens": 800,
        "p99_ttft_ms": 50.0, "p99_tpot_ms": tpot, "by_kind": {"text": {"p99_tpot_ms": tpot}},
        "stages": [{"decode": 0.5}], "errors": [""], "p99_late_ms": 1.0, "client_cpu_share": 0.1,
    }  # fmt: skip
    machine = {"chip": "chip", "cores": 2, "memory_gib": 8.0, "commit": "abc", "load_at_start": 0.1}
    return {
        "cell": {"kind": kind, "load": load, "system": system, "repeat": int(repeat)},
        "status": "done", "rate": rate, "windows": [window], "others_share": 0.0, "memory_mb": 100.0,
        "search": {"max_request_goodput": rate, "drifted": False} if kind == "search" else None,
        "cpu_shares": {"pd-0": 0.9}, "server": {"seconds_to_ready": 4.0}, "date": "2026-11-28",
        "machine": machine | {"versions": {}}, **more,
    }  # fmt: skip


def test_what_rates_come_from_is_first_and_systems_take_turns(tmp_path: Path) -> None:
    assert [cell.name for cell in plan_cells(matrix(tmp_path))] == [
        "capacity.mix.colocated.0", "capacity.images-4.colocated.0",
        "capacity.mix.colocated.1", "capacity.images-4.colocated.1",
        "fixed.mix.colocated.0", "fixed.mix.epd-shared.0",
        "search.images-4.colocated.0", "search.images-4.epd-shared.0",
        "fixed.mix.epd-shared.1", "fixed.mix.colocated.1",
        "search.images-4.epd-shared.1", "search.images-4.colocated.1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('loads = ["mix"]', 'loads = ["text"]'), "cells[1].loads: 'text' is not known"),
        (('loads = ["mix", "images-4"]', 'loads = ["images-4"]'), "load 'mix' has fixed cells and no rate"),
        ((', launch = "2E1PD"', ""), "system 'epd-shared' needs either launch or commands"),
        (('"${MODEL_FOLDER}"', '"${ELSEWHERE}"'), "model needs the environment variable ELSEWHERE"),
    ],
)
def test_a_file_that_cannot_be_measured_is_an_error_that_names_the_field(tmp_path, change, message):
    with pytest.raises(ConfigError) as caught:
        matrix(tmp_path, MATRIX.replace(*change))
    assert message in str(caught.value)


def test_a_rate_is_a_share_of_the_median_capacity_and_stays_once_it_was_used(tmp_path: Path) -> None:
    asked = matrix(tmp_path)
    finished = [found(f"capacity.mix.colocated.{n}", rate=rate) for n, rate in enumerate((10.0, 20.0))]
    assert fixed_rate(asked, "mix", []) is None
    assert fixed_rate(asked, "mix", finished) == pytest.approx(0.7 * 15.0)
    finished.append(found("fixed.mix.colocated.0", rate=9.0))
    assert fixed_rate(asked, "mix", finished) == 9.0


def test_a_search_begins_below_a_rate_that_the_system_did_not_sustain(tmp_path: Path) -> None:
    asked, cell = matrix(tmp_path), Cell("search", "mix", "epd-shared", 0)
    finished = [
        found("fixed.mix.epd-shared.0", rate=10.0, failed=1),
        found("fixed.mix.colocated.0", rate=10.0),
    ]
    assert search_start(asked, cell, finished) == 6.0
    assert search_start(asked, Cell("search", "mix", "colocated", 0), finished) == 10.0


def results(asked: Matrix, tmp_path: Path, cells: list[JsonObject]) -> CellResults:
    """Written and read again."""
    files = CellFiles(tmp_path / "results", asked.name)
    files.write_plan(asked, plan_cells(asked))
    for cell in cells:
        files.write(Cell(**cell["cell"]), cell)
    [(plan, read)] = read_folder(tmp_path / "results")
    return CellResults(plan, read)


def test_ratios_are_of_equal_repeats_and_say_whether_the_target_is_met(tmp_path: Path) -> None:
    cells = [found(f"search.images-4.colocated.{n}", rate=rate) for n, rate in enumerate((2.0, 4.0))]
    cells += [found(f"search.images-4.epd-shared.{n}", rate=rate) for n, rate in enumerate((4.0, 5.6))]
    cells += [found("fixed.mix.colocated.0", rate=8.0, tpot=10.0)]
    cells += [found("fixed.mix.epd-shared.0", rate=8.0, tpot=6.0, failed=4), found("fixed.mix.epd-shared.1")]
    measured = results(matrix(tmp_path), tmp_path, cells)
    said = {(one.load, one.metric.title): one for one in comparisons(measured)}
    goodput = said["images-4", "goodput by search, req/s"]
    assert (goodput.ratio.low, goodput.ratio.high) == (pytest.approx(1.4), 2.0)
    assert (goodput.reading, goodput.target) == ("better", "≥ 1.3: met")
    tpot = said["mix", "P99 TPOT of text streams, ms"]
    assert tpot.ratio.ratio == pytest.approx(0.6) and tpot.ratio.windows == (1, 1)
    assert (tpot.reading, tpot.target) == ("open: requests failed", "≤ 0.5: **missed** by 20%")


def test_a_system_that_sustained_no_rate_is_not_compared(tmp_path: Path) -> None:
    cells = [found(f"search.images-4.colocated.{n}") for n in range(2)]
    cells += [found(f"search.images-4.epd-shared.{n}", rate=4.0) for n in range(2)]
    [one] = comparisons(results(matrix(tmp_path), tmp_path, cells))
    assert (one.reading, one.target) == ("open", "≥ 1.3: no rate to compare with")


def test_the_report_names_what_is_missing_failed_and_disturbed(tmp_path: Path) -> None:
    cells = [found("fixed.mix.colocated.0", rate=8.0), found("fixed.mix.epd-shared.0", others_share=0.4)]
    cells += [found("capacity.mix.colocated.0", status="failed", why="it\ndied", windows=[], server=None)]
    text = report([results(matrix(tmp_path), tmp_path, cells)], "command")
    assert "- 2 of 12 cells are measured." in text and "- Failed: capacity.mix.colocated.0: it died" in text
    assert "Not measured (9): capacity.images-4.colocated.0, " in text
    assert "LOADED MACHINE: during 1 cells other processes used more than 5% of a core (at most 0.40" in text
    assert "**mix** at 8 requests/s, SLO ttft:500 tpot:25" in text

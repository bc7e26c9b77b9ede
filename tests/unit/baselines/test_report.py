"""Verdicts, targets and text of reports made of cells whose figures are known."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.baselines.cell import CellFiles, plan_cells
from benchmarks.baselines.cell_results import (
    TARGETS,
    CellResults,
    best_setting,
    comparisons,
    explain_loss,
    judge_target,
    lost,
    planned_targets,
    stage_table,
    won,
)
from benchmarks.baselines.matrix import Matrix, as_fields
from benchmarks.baselines.report import main
from benchmarks.baselines.tables import number, report, spread
from support.engine.cells import TOML, cell, window

MATRIX = msgspec.toml.decode(TOML, type=Matrix)
PLAN = {"matrix": as_fields(MATRIX), "cells": [one.name for one in plan_cells(MATRIX)]}
REUSE, TEXT_TPOT, FOUR = TARGETS


def results(*cells) -> CellResults:
    return CellResults(PLAN, cells)


def fixed(load: str, **by_system: list[dict]) -> list[dict]:
    """Windows by system, one per repeat."""
    return [
        cell("fixed", load, system.replace("_", "-"), repeat, rate=5.0, windows=[one])
        for system, windows in by_system.items()
        for repeat, one in enumerate(windows)
    ]


def searches(load: str, **by_system: list[float]) -> list[dict]:
    return [
        cell("search", load, system.replace("_", "-"), repeat, goodput=rate)
        for system, rates in by_system.items()
        for repeat, rate in enumerate(rates)
    ]


FULL = [
    *fixed(
        "mix",
        colocated=[window(tpot=20.0), window(tpot=22.0)],
        epd_shared=[window(tpot=9.0, ttft=150.0), window(tpot=10.0, ttft=160.0)],
        vllm=[window(tpot=5.0), window(tpot=6.0, stages=[{}] * 10)],
    ),
    *searches("images-4", colocated=[2.0, 2.2], epd_shared=[2.4, 2.5]),
    *searches("reuse-50", vllm=[2.0, 2.0], epd_shared=[5.0, 4.0]),
    *[cell("capacity", "mix", "colocated", repeat, windows=[window(8.0)]) for repeat in (0, 1)],
    *[cell("capacity", "mix", "colocated-big", repeat, windows=[window(10.0)]) for repeat in (0, 1)],
]


def test_targets_are_met_missed_by_how_much_or_not_measured():
    found = results(*FULL)
    reuse, four, tpot = (judge_target(found, target) for target in (REUSE, FOUR, TEXT_TPOT))
    assert (reuse.state, reuse.ratio, reuse.low, reuse.high) == ("met", 2.25, 2.0, 2.5)
    assert reuse.by == "12% above 2"
    assert (four.state, four.by) == ("missed", "22% below 1.5")
    assert (tpot.state, tpot.by) == ("met", "10% below 0.5")
    assert judge_target(results(), FOUR).state == "not measured"


def test_the_generators_lateness_is_reported_for_each_system():
    windows = {
        "colocated": [window(p99_late_ms=3.0), window(p99_late_ms=1.0)],
        "vllm": [window(p99_late_ms=900.0)],
    }
    text = report([results(*fixed("mix", **windows))], [])
    assert (
        "sent late at P99 by at most: colocated 3.0 ms, vllm 900.0 ms; it took at most 5% of a core" in text
    )


def test_a_server_that_sustained_nothing_makes_no_ratio():
    outcome = judge_target(results(*searches("reuse-50", vllm=[0.0], epd_shared=[3.0])), REUSE)
    assert (outcome.state, outcome.by) == ("not measured", "vllm sustained no rate at all; epd-shared 3/s")


def test_only_targets_with_both_sides_planned_are_judged():
    assert planned_targets(results()) == list(TARGETS)
    part = {**PLAN, "cells": [name for name in PLAN["cells"] if not name.startswith("search.")]}
    assert planned_targets(CellResults(part, [])) == [TEXT_TPOT]


def test_wins_and_losses_are_those_that_every_repeat_says():
    lines = comparisons(results(*FULL))
    wins = {(line.load, line.metric, line.against) for line in won(lines)}
    assert ("mix", "text_tpot", "colocated") in wins
    assert ("reuse-50", "goodput", "vllm") in wins
    losses = {(line.load, line.metric, line.against) for line in lost(lines)}
    assert ("mix", "ttft", "colocated") in losses and ("mix", "tpot", "vllm") in losses
    single = results(*(one for one in FULL if one["cell"]["repeat"] == 0))
    assert {line.reading for line in comparisons(single)} == {"open"}


def test_latencies_are_not_compared_while_requests_fail():
    cells = fixed("mix", colocated=[window(tpot=20.0)] * 2, epd_shared=[window(tpot=9.0, failed=1)] * 2)
    assert results(*cells).reading("tpot", "mix", "colocated", "epd-shared") == "open: requests failed"
    assert results(*cells).reading("attainment", "mix", "colocated", "epd-shared") == "worse"


def test_repeats_are_paired_and_one_without_its_partner_does_not_count():
    cells = fixed("mix", colocated=[window(tpot=20.0), window(tpot=40.0)], epd_shared=[window(tpot=10.0)])
    found = results(*cells).ratio("tpot", "mix", "colocated", "epd-shared")
    assert found is not None and (found.ratio, found.windows) == (0.5, (1, 1))


def test_the_report_names_the_stage_with_the_largest_difference():
    slow = {"queue": 0.01, "encode": 0.2, "prefill": 0.03, "decode": 0.9}
    cells = fixed(
        "mix", colocated=[window()], epd_shared=[window(stages=[slow] * 10)], vllm=[window(stages=[{}] * 10)]
    )
    found = results(*cells)
    assert stage_table(found, "mix", "epd-shared")["encode"] == (0.2, 0.2)
    assert explain_loss(found, "mix", "ttft", "colocated") == "encode: P99 200 ms, 20 ms there"
    assert explain_loss(found, "mix", "ttft", "vllm") == "encode: P99 200 ms"
    assert explain_loss(found, "mix", "tpot", "colocated") == (
        "decode: median 900 ms, 500 ms there; cores used 1.10, 1.10 there"
    )
    assert explain_loss(found, "text", "ttft", "colocated") == ""


def test_the_baselines_own_settings_are_compared():
    assert best_setting(results(*FULL), "mix") == ("colocated-big", pytest.approx(0.8))
    assert best_setting(results(*FULL), "text") is None


def test_the_text_says_what_was_met_missed_lost_and_left_out():
    failed = cell("fixed", "text", "vllm", status="failed", why="the server died", windows=[])
    loud = cell("fixed", "text", "colocated", rate=5.0, others_share=0.4)
    text = report([results(*FULL, failed, loud)])
    assert (
        "| goodput with 4 pictures | ≥ 1.5 x colocated | 1.17 (1.14 – 1.20) | **missed** | 22% below 1.5 |"
        in text
    )
    assert (
        "| P99 TPOT of text streams in the mix | ≤ 0.5 x colocated | 0.45 (0.45 – 0.45) | **met** |" in text
    )
    assert "- mix, against colocated: P99 TTFT 1.55 x (1.50 – 1.60). queue: P99 10 ms, 10 ms there." in text
    assert (
        "| mix, P99 TPOT of text streams, ms | epd-shared / colocated | 0.452 (0.45 – 0.455) | better |"
        in text
    )
    assert "mix: colocated reaches 80% of its best setting (colocated-big): NOT within 10 %." in text
    assert "- Failed: fixed.text.vllm.0: the server died" in text
    assert "fixed.text.epd-shared (0, 1)" in text
    assert "LOADED MACHINE: during 1 cells" in text


def test_requests_that_are_not_alike_are_told():
    cells = fixed("mix", epd_shared=[window()], vllm=[window(input_lens=[60] * 10)])
    assert "fixed.mix.vllm.0" in report([results(*cells)])


def test_a_report_of_nothing_is_one():
    text = report([results()])
    assert "Nothing is measured yet." in text and "0 of " in text


def test_numbers_and_spreads():
    assert [number(value) for value in (1234.6, 0.12345, float("nan"), float("inf"))] == [
        "1,235",
        "0.123",
        "–",
        "∞",
    ]
    assert spread([]) == "–"
    assert spread([2.0, 2.0]) == "2"
    assert spread([3.0, 1.0, 2.0]) == "2 (1 – 3)"


def test_the_report_maker_writes_the_text(tmp_path, capsys):
    files = CellFiles(tmp_path / "cells", "toy")
    files.write_plan(MATRIX, plan_cells(MATRIX))
    (planned,) = [one for one in plan_cells(MATRIX) if one.name == "fixed.mix.vllm.0"]
    files.write(planned, cell("fixed", "mix", "vllm", rate=5.0))
    to = tmp_path / "to"
    to.mkdir()
    assert main([str(tmp_path / "cells")]) == 0
    assert "**mix** at 5 requests/s" in capsys.readouterr().out
    assert main([str(tmp_path / "cells"), "--write", "--to", str(to)]) == 0
    assert {path.name for path in to.iterdir()} == {"baselines.md"}
    assert main([str(Path(tmp_path / "none"))]) == 2

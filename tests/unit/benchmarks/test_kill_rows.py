"""Runs that are added to those of a page."""

from __future__ import annotations

import pytest

from benchmarks.kills.__main__ import PAGE, RIGHT, page
from benchmarks.kills.load import Trial
from benchmarks.kills.rows import Row, added, reasons_of, rows_of

FAULT = "store killed"


def trial(system: str, answers: list[list[int]], stall: float = 0.5, error: str = "") -> Trial:
    return Trial(system, FAULT, 0, answers, stall, 1, [error] if error else [])


def test_a_failed_request_has_no_wrong_tokens_and_another_answer_has() -> None:
    row = Row.of(trial("native", [[], [1, 2], [1, 3]]), [[4], [1, 2], [1, 2]])
    assert (row.requests, row.failed, row.wrong, row.by_hand) == (3, 1, 1, 1)
    assert Row.of(trial("native", [[1]]), None).cells[5] == "not compared"


def test_runs_are_added_and_their_stalls_stay_apart() -> None:
    first, second = Row(FAULT, "native", 24, 1, 0, (0.5,), 0), Row(FAULT, "native", 24, 2, 1, (4.25,), 1)
    [both] = added([first, second]).values()
    assert both.cells == (FAULT, "native", "2", "48", "3", "1", "0.5, 4.25", "1")
    assert (first + Row(FAULT, "native", 24, 0, None, (1.0,), 0)).wrong is None


def test_a_page_is_read_as_it_was_written_and_added_to() -> None:
    trials = [trial(RIGHT, [[1], [2]]), trial("native", [[1], []], 0.46, "ValueError: HTTP 500")]
    once = page(trials)
    [row] = rows_of(once)
    assert row.cells == (FAULT, "native", "1", "2", "1", "0", "0.46", "1")
    twice = page([trial(RIGHT, [[1], [2]]), trial("native", [[1], [3]], 1.5)], once)
    [row] = rows_of(twice)
    assert row.cells == (FAULT, "native", "2", "4", "1", "1", "0.46, 1.5", "2")
    assert reasons_of(twice) == {f"native, {FAULT}: ValueError: HTTP 500"}


@pytest.mark.parametrize("line", ["| fault | system |", "| --- " * 8 + "|", "text", ""])
def test_other_lines_are_no_rows(line: str) -> None:
    assert Row.read(line) is None


def test_the_published_page_has_runs_of_both_systems() -> None:
    systems = {row.system for row in rows_of(PAGE.read_text(encoding="utf-8"))}
    assert {"native", "vllm-epd", "vllm-pd"} <= systems

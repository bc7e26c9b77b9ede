"""What a run of the floods keeps of the page that it writes anew."""

from __future__ import annotations

from benchmarks.fairness.__main__ import BEFORE, RESULT, kept_rows, page_rows
from benchmarks.fairness.floods import FLOODS

HEAD = "| flood | takes | commit | B alone | B beside one | B P50 | B P99 | refused | bound | held | A's |"


def row(flood: str, commit: str, p99: int) -> str:
    return f"| `{flood}` | loop | {commit} | 24 |  | 35 | {p99} | 0 of 4 | 99 | no | 2 x 400, 1 x OK |"


def test_the_earlier_commits_rows_stay_and_others_go() -> None:
    page = [HEAD, row("long-texts", BEFORE, 1), row("long-texts", "a7d25491", 2), row("gets", BEFORE, 3)]
    kept = kept_rows("\n".join([*page, "", "## Again", HEAD, row("long-texts", BEFORE, 4)]), BEFORE)
    assert [(cells[0], cells[4], cells[6], cells[-1]) for cells in kept] == [
        ("`long-texts`", "", "1", "2 x 400, 1 x OK"),
        ("`gets`", "", "3", "2 x 400, 1 x OK"),
    ]


def test_the_page_has_rows_of_the_earlier_commit_for_floods_that_are_there() -> None:
    kept = kept_rows(RESULT.read_text(encoding="utf-8"), BEFORE)
    assert len(kept) >= 12
    assert {cells[0].strip("`") for cells in kept} <= FLOODS.keys()


def test_a_run_of_some_floods_leaves_the_rows_of_others() -> None:
    page = [HEAD, row("long-texts", BEFORE, 1), row("long-texts", "a7d25491", 2), row("gets", "a7d25491", 3)]
    measured = [tuple(cell.strip() for cell in row("long-texts", "b8e36502", 4).strip("|").split(" | "))]
    rows = page_rows("\n".join([*page, row("no-flood-any-more", "a7d25491", 5)]), measured)
    assert [(cells[0], cells[2], cells[6]) for cells in rows] == [
        ("`gets`", "a7d25491", "3"),
        ("`long-texts`", "b8e36502", "4"),
    ]

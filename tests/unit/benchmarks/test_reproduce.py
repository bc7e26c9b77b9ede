"""`python -m benchmarks reproduce`: each page has a cell or says what it needs; rows beside each other."""

from __future__ import annotations

from pathlib import Path

from benchmarks.programs import programs
from benchmarks.reproduce import CELLS, NEEDS, shown
from benchmarks.result_page import RESULTS

FOLDER = Path(__file__).parents[3] / "benchmarks"


def test_each_page_has_a_cell_or_says_what_it_needs():
    pages = {path.name for path in RESULTS.glob("*.md")}
    assert pages == {cell.page for cell in CELLS} | set(NEEDS)
    assert not {cell.page for cell in CELLS} & set(NEEDS)


def test_a_cell_runs_a_program_of_the_tree_and_its_rows_are_published():
    for cell in CELLS:
        folder = FOLDER / "micro" if cell.arguments[2] == "micro" else FOLDER
        assert cell.arguments[3 if folder.name == "micro" else 2] in programs(folder)
        published = shown((RESULTS / cell.page).read_text("utf-8"), cell.rows)
        assert len(published) == len(cell.rows) + 2


def test_rows_come_with_the_head_of_their_table_and_the_newest_one_counts():
    text = "| a | n |\n|---|---|\n| x | 1 |\n\nwords\n\n| a | n |\n|---|---|\n| x | 2 |\n| y | 3 |\n"
    assert shown(text, ("| x |", "| y |", "| z |")) == ["| a | n |", "|---|---|", "| x | 2 |", "| y | 3 |"]

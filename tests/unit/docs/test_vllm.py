"""docs/vllm.md names every option of the connector and every class that it serves."""

from __future__ import annotations

from pathlib import Path

from triptych.base.vllm_classes import CLASSES
from triptych.integrations.vllm.options import _NAMES

PAGE = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text()


def test_every_option_is_on_the_page():
    assert [name for name in _NAMES if f"`{name}`" not in PAGE] == []


def test_every_class_of_the_table_is_in_the_pages_with_what_it_can_do():
    rows = [line.split("|") for line in PAGE.splitlines() if "ForConditionalGeneration" in line]
    cells = {name: row for row in rows for name in CLASSES if name in row[1]}
    assert cells.keys() == CLASSES.keys()
    for name, known in CLASSES.items():
        assert cells[name][3].strip() == ("yes" if known.saved_by_vllm else "no")
        assert cells[name][4].strip().startswith("yes" if known.one_run else "no")

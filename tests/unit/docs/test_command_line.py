"""docs/cli.md is what click knows of the commands. TRIPTYCH_WRITE_CLI=1 writes it instead of comparing."""

from __future__ import annotations

import os
from pathlib import Path

from support.pages.command_line import page

CLI = Path(__file__).parents[3] / "docs" / "cli.md"
BEGIN, END = "<!-- cli: begin -->\n", "\n<!-- cli: end -->"


def test_the_page_has_every_command_and_option_with_its_default_and_help() -> None:
    text = CLI.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    if os.environ.get("TRIPTYCH_WRITE_CLI"):
        CLI.write_text(head + BEGIN + page() + END + rest.partition(END.strip())[2], encoding="utf-8")
        return
    shown = rest.partition(END)[0]
    assert shown == page(), "write it with TRIPTYCH_WRITE_CLI=1 pytest tests/unit/docs/test_command_line.py"

"""The page of what runs on a GPU: each part writes its rows as they come, so that what was measured stays."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Begins the name of a case in a part's file; such lines are not on the page.
_CASE = "@"
_TITLE = "# On a GPU\n\nWritten by `make gpu`, part by part: see [GPUs](../../docs/engine.md#gpus)."


class PartPage:
    """The file of one part: lines of Markdown, written through at once. `failures` counts its cases."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.failures = 0

    def write(self, line: str = "") -> None:
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def table(self, *columns: str) -> None:
        """Begins a table."""
        self.write()
        self.row(*columns)
        self.write("|---" * len(columns) + "|")

    def row(self, *cells: object) -> None:
        self.write(f"| {' | '.join(map(str, cells))} |")

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """One case: what it raises ends it alone, and is on the page."""
        began = time.monotonic()
        self.write(_CASE + name)
        try:
            yield
        except Exception as error:  # of any kind: the other cases are to be measured, too
            self.failures += 1
            said = " ".join(f"{type(error).__name__}: {error}".split())[:400].replace("|", "\\|")
            self.write()
            self.write(f"**{name} failed** after {time.monotonic() - began:.0f} s: {said}")


def section(text: str, ended: str) -> str:
    """What a part's file says, and how the part ended: "" if it was finished."""
    lines = text.splitlines()
    kept = [line for line in lines if not line.startswith(_CASE)]
    if ended:
        last = [line[1:] for line in lines if line.startswith(_CASE)]
        kept += ["", f"**{ended}**" + (f" in: {last[-1]}" if last else "")]
    return "\n".join(kept).strip("\n")


def put(page: Path, title: str, body: str) -> None:
    """Puts the section of this title into the page, in the place of the one before; others stay."""
    text = page.read_text("utf-8") if page.exists() else ""
    sections = dict(re.findall(r"^## (.+)\n\n?((?:(?!## ).*\n?)*)", text, re.MULTILINE))
    sections[title] = body
    parts = [f"## {name}\n\n{sections[name].strip()}" for name in sorted(sections)]
    page.write_text("\n\n".join([_TITLE, *parts]) + "\n", encoding="utf-8")

"""The programs of a folder: modules that have a `main`, and packages with a `__main__.py`, by name."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path

_ROOT = Path(__file__).parents[1]


def programs(folder: Path) -> dict[str, Path]:
    found = {path.stem: path for path in folder.glob("[a-z]*.py") if "\ndef main(" in path.read_text()}
    return found | {path.parent.name: path for path in folder.glob("*/__main__.py")}


def listing(folder: Path) -> str:
    """A line for each: its name and the first line of its docstring; nothing is imported."""
    lines = []
    for name, path in sorted(programs(folder).items()):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        lines.append(f"{name:20} {text.partition(chr(10))[0]}\n")
    return "".join(lines)


def run(folder: Path, arguments: list[str], command: str) -> int:
    """Runs the program that the first argument names, with the rest; its exit status, 2 for no such name."""
    found = programs(folder)
    if arguments[0] not in found:
        sys.stderr.write(f"no benchmark {arguments[0]!r}: use one of {', '.join(sorted(found))}\n")
        return 2
    sys.argv = [f"{command} {arguments[0]}", *arguments[1:]]
    path = found[arguments[0]].relative_to(_ROOT).with_suffix("")
    return int(import_module(".".join(path.parts)).main() or 0)

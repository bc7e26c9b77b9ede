"""`python -m benchmarks` shows the targets and how far they are reached; with a name it runs a benchmark.

`python -m benchmarks list` names the benchmarks, `python -m benchmarks NAME [ARGUMENTS]` runs one.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path

from benchmarks import targets
from triptych.base.progress import lines_on_stderr

_FOLDER = Path(__file__).parent


def _sources() -> dict[str, Path]:
    """The modules here that have a `main`, and packages with a `__main__.py`, by name."""
    result = {path.stem: path for path in _FOLDER.glob("[a-z]*.py") if "def main(" in path.read_text()}
    return result | {path.parent.name: path for path in _FOLDER.glob("*/__main__.py")}


def names() -> list[str]:
    """All benchmarks."""
    return sorted(_sources())


def summary(name: str) -> str:
    """The first line of the module's docstring; the module is not imported."""
    text = ast.get_docstring(ast.parse(_sources()[name].read_text()))
    return (text or "").partition("\n")[0]


def main(arguments: list[str]) -> int:
    if not arguments:
        sys.stdout.write(targets.table(targets.read()))
        return 0
    if arguments[0] == "list":
        for name in names():
            sys.stdout.write(f"{name:20} {summary(name)}\n")
        return 0
    if arguments[0] not in names():
        sys.stderr.write(f"no benchmark {arguments[0]!r}: use one of {', '.join(names())}\n")
        return 2
    sys.argv = [f"python -m benchmarks {arguments[0]}", *arguments[1:]]
    path = _sources()[arguments[0]].relative_to(_FOLDER.parent).with_suffix("")
    module = import_module(".".join(path.parts))
    with lines_on_stderr():
        result = module.main()
    return int(result or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

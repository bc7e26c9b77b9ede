"""`python -m benchmarks` lists the benchmarks, `python -m benchmarks NAME [ARGUMENTS]` runs one."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path

_FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Every module of this folder that has a `main`, and every package whose `__main__.py` has one."""
    modules = [path for path in _FOLDER.glob("[a-z]*.py") if "def main(" in path.read_text()]
    packages = [path.parent for path in _FOLDER.glob("*/__main__.py")]
    return sorted(path.stem for path in (*modules, *packages))


def summary(name: str) -> str:
    """The first line of the module's docstring; the module is not imported."""
    text = ast.get_docstring(ast.parse(_source(name).read_text()))
    return (text or "").partition("\n")[0]


def _source(name: str) -> Path:
    package = _FOLDER / name / "__main__.py"
    return package if package.exists() else _FOLDER / f"{name}.py"


def main(arguments: list[str]) -> int:
    if not arguments:
        for name in names():
            sys.stdout.write(f"{name:20} {summary(name)}\n")
        return 0
    if arguments[0] not in names():
        sys.stderr.write(f"no benchmark {arguments[0]!r}: use one of {', '.join(names())}\n")
        return 2
    sys.argv = [f"python -m benchmarks {arguments[0]}", *arguments[1:]]
    path = _source(arguments[0]).relative_to(_FOLDER.parent).with_suffix("")
    module = import_module(".".join(path.parts))
    result = module.main()
    return int(result or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

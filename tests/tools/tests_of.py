"""The test files of a module: those that name it, units first, then those that name its package.

    python tests/tools/tests_of.py proxy/routing.py

prints the unit tests that name the module itself, for `make check`; where none does, those of its package.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class TestFiles:
    """The test files of a tree, by what they name."""

    def __init__(self, tree: Path = ROOT) -> None:
        self._tree = tree
        self._files = {file: file.read_text() for file in sorted((tree / "tests").rglob("test_*.py"))}

    def of_module(self, path: str) -> list[str]:
        """Those that have its name and place, and those that name it."""
        *folders, name = _place(path)
        homes = ["/".join(["tests", kind, *folders, f"test_{name}.py"]) for kind in ("unit", "integration")]
        own = [home for home in homes if self._tree / home in self._files]
        return list(dict.fromkeys([*own, *self._naming(path, _naming_pattern(path))]))

    def of_package(self, path: str) -> list[str]:
        return self._naming(path, rf"{re.escape(_dotted(path).rpartition('.')[0])}\b")

    def in_process(self, path: str) -> list[str]:
        """What runs the module with those around it: files of tests/integration, its own folder first."""
        folders = _dotted(path).split(".")[1:-1]
        homes = ["/".join(folders[:depth]) for depth in range(len(folders), 0, -1)]
        return [
            str(file.relative_to(self._tree))
            for home in homes
            for file in self._files
            if file.parent == self._tree / "tests" / "integration" / home
        ]

    def of_callers(self, path: str) -> list[str]:
        """The tests of the modules that import this one."""
        return list(dict.fromkeys(test for caller in self._callers(path) for test in self.of_module(caller)))

    def _callers(self, path: str) -> list[str]:
        """Modules of the product that name it; what is behind links is found by its own path."""
        pattern = re.compile(_naming_pattern(path), re.MULTILINE)
        folders = ("proxy", "encoder_worker", "pd_worker", "ec_connector", "protos", "triptych")
        files = (file for folder in folders for file in sorted((self._tree / folder).rglob("*.py")))
        found = (file for file in files if "_pb2" not in file.name and pattern.search(file.read_text()))
        return [str(file.relative_to(self._tree)) for file in found]

    def _naming(self, path: str, pattern: str) -> list[str]:
        """Units first, those at the module's own place before its users, then by how little they import."""
        found = [file for file, text in self._files.items() if re.search(pattern, text, re.MULTILINE)]
        imports = re.compile(r"^from|^import", re.MULTILINE)
        place = _place(path)

        def rank(file: Path) -> tuple[bool, int, int]:
            own = _place(str(file.relative_to(self._tree / "tests")).replace("test_", ""))[1:]
            shared = os.path.commonprefix([place, own])
            return "unit" not in file.parts, -len(shared), len(imports.findall(self._files[file]))

        found.sort(key=rank)
        return [str(file.relative_to(self._tree)) for file in found]


def _dotted(path: str) -> str:
    return "triptych." + path.removeprefix("triptych/").removesuffix(".py").replace("/", ".")


def _place(path: str) -> list[str]:
    """The folders and the name, as tests mirror them."""
    return _dotted(path).split(".")[1:]


def _naming_pattern(path: str) -> str:
    package, _, name = _dotted(path).rpartition(".")
    here = re.escape(package)
    return rf"{here}\.{name}\b|^from {here} import .*\b{name}\b"


def units_of(files: TestFiles, path: str) -> list[str]:
    """The unit tests that name the module; where none does, those that name its package."""
    for found in (files.of_module(path), files.of_package(path)):
        if units := [file for file in found if file.startswith("tests/unit/")]:
            return units
    return []


if __name__ == "__main__":
    units = units_of(TestFiles(), sys.argv[1])
    if not units:
        sys.exit(f"no unit test names {sys.argv[1]}: give a module of the product, such as proxy/routing.py")
    print("\n".join(units))

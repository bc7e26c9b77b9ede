"""Prints the dependencies of pyproject.toml, and those of the extras and groups that are named, one per line.

In a layer of their own they are not installed again when the code changes. usage: requirements.py [NAME ...]
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path


def requirements(pyproject: str, extras: list[str]) -> list[str]:
    """The requirements of the project and of its `extras`, or groups."""
    told = tomllib.loads(pyproject)
    project = told["project"]
    groups: dict[str, list[str | dict[str, str]]] = (
        project["optional-dependencies"] | told["dependency-groups"]
    )

    def lines(name: str) -> Iterator[str]:
        for line in groups[name]:
            if isinstance(line, str):
                yield line
            else:
                yield from lines(line["include-group"])

    return [*project["dependencies"], *(line for extra in extras for line in lines(extra))]


if __name__ == "__main__":
    print("\n".join(requirements(Path("pyproject.toml").read_text(encoding="utf-8"), sys.argv[1:])))

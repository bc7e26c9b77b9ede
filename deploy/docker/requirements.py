"""Prints the dependencies of pyproject.toml, and those of the extras and groups that are named, one per line.

In a layer of their own they are not installed again when the code changes. usage: requirements.py [NAME ...]
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: str, extras: list[str]) -> list[str]:
    """The requirements of the project and of its `extras`, or groups."""
    told = tomllib.loads(pyproject)
    project = told["project"]
    optional: dict[str, list[str]] = project["optional-dependencies"] | told["dependency-groups"]
    return [*project["dependencies"], *(line for extra in extras for line in optional[extra])]


if __name__ == "__main__":
    print("\n".join(requirements(Path("pyproject.toml").read_text(encoding="utf-8"), sys.argv[1:])))

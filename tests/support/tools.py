"""Debian's programs that slow tests drive, as `make tools` unpacks them."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".tools" / "bin"


def tool(name: str) -> str:
    """The path of a program, like "redis-server". FileNotFoundError where it is missing."""
    path = FOLDER / name
    if not path.exists():
        raise FileNotFoundError(f"{name} is not unpacked: `make tools` does it, without root")
    return str(path)

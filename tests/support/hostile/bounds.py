"""Calls that bound something, found in the source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

_BOUNDS = re.compile(r"(Bounded)?Semaphore|\w*PoolExecutor|CapacityLimiter|Overloaded|TCPConnector")
_QUEUES = re.compile(r"\w*Queue")
#: Of this project, without a size.
OWN_QUEUES = {"OutputQueue", "ChoiceQueue", "JobQueue"}


def bounds(source: str) -> set[str]:
    """The names in a source whose calls make a bound."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        sized = bool(node.args) or any(word.arg == "maxsize" for word in node.keywords)
        if _BOUNDS.fullmatch(name) or (_QUEUES.fullmatch(name) and sized and name not in OWN_QUEUES):
            found.add(name)
    return found


def bounds_below(folder: Path) -> set[tuple[str, str]]:
    """Files below the folder with the names of such calls in them."""
    return {
        (str(path.relative_to(folder)), name)
        for path in folder.rglob("*.py")
        for name in bounds(path.read_text())
    }

"""How long cells take: estimates from finished ones. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.baselines.cell import Cell

#: Seconds, before a cell of the kind has been finished.
FIRST_GUESS = {"capacity": 45.0, "fixed": 90.0, "search": 420.0}


def estimate(cell: Cell, finished: Sequence[Mapping[str, Any]]) -> float:
    """Seconds: the median of finished cells of the kind on this load by this system, on this load, of the
    kind; whichever there is first."""
    wanted = {"kind": cell.kind, "load": cell.load, "system": cell.system}
    for names in (("kind", "load", "system"), ("kind", "load"), ("kind",)):
        walls = [
            found["wall_s"]
            for found in finished
            if found["status"] == "done" and all(found["cell"][name] == wanted[name] for name in names)
        ]
        if walls:
            return float(statistics.median(walls))
    return FIRST_GUESS[cell.kind]


def seconds_left(cells: Iterable[Cell], finished: Sequence[Mapping[str, Any]]) -> float:
    return sum(estimate(cell, finished) for cell in cells)


def told(seconds: float) -> str:
    """ "1 h 05 min", "12 min", "40 s"."""
    minutes = round(seconds / 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min" if seconds >= 90 else f"{seconds:.0f} s"

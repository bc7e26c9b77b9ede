"""What finished cells say of the next ones: the rate that they offer and how long they take. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from benchmarks.baselines.cell import Cell
from benchmarks.baselines.matrix import Matrix
from triptych.types import JsonObject

Found = JsonObject
#: A search begins below a rate that was not sustained, and at one that was.
_BELOW = 0.6
#: Seconds, before a cell of the kind has been finished.
FIRST_GUESS = {"capacity": 45.0, "fixed": 90.0, "search": 420.0}


def done_cells(finished: Sequence[Found], kind: str, load: str, system: str = "") -> list[Found]:
    """Those that are measured; of any system without one."""
    wanted = {"kind": kind, "load": load} | ({"system": system} if system else {})
    return [
        found
        for found in finished
        if found["status"] == "done" and all(found["cell"][name] == value for name, value in wanted.items())
    ]


def fixed_rate(matrix: Matrix, load: str, finished: Sequence[Found]) -> float | None:
    """Requests per second for every system and repeat alike; None while there is no capacity.

    A rate that a fixed cell has been measured with stays, whatever capacities come later.
    """
    if load in matrix.rates:
        return matrix.rates[load]
    for found in done_cells(finished, "fixed", load):
        return float(found["rate"])
    capacities = [
        float(found["windows"][0]["request_throughput"])
        for found in done_cells(finished, "capacity", load, matrix.capacity.of)
    ]
    return statistics.median(capacities) * matrix.fixed.share if capacities else None


def search_start(matrix: Matrix, cell: Cell, finished: Sequence[Found]) -> float | None:
    """The first rate of a search: what this system did at the fixed rate says on which side to begin."""
    rate = fixed_rate(matrix, cell.load, finished)
    if rate is None:
        return None
    fixed = done_cells(finished, "fixed", cell.load, cell.system)
    sustained = [bool(found["windows"][0]["sustained"]) for found in fixed]
    return rate * _BELOW if sustained and 2 * sum(sustained) < len(sustained) else rate


def window_requests(matrix: Matrix, rate: float) -> int:
    """Of a fixed window: until its number of requests, at most its seconds."""
    return max(min(matrix.fixed.requests, round(rate * matrix.fixed.seconds)), 5)


def estimate(cell: Cell, finished: Sequence[JsonObject]) -> float:
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


def seconds_left(cells: Iterable[Cell], finished: Sequence[JsonObject]) -> float:
    return sum(estimate(cell, finished) for cell in cells)


def format_duration(seconds: float) -> str:
    """ "1 h 05 min", "12 min", "40 s"."""
    minutes = round(seconds / 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min" if seconds >= 90 else f"{seconds:.0f} s"

"""One cell measured with the harness of `triptych bench`, at the rate that finished cells give it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from benchmarks.baselines.cell import Cell, seed_of
from benchmarks.baselines.matrix import Matrix
from benchmarks.baselines.servers import Server, cpu_shares, machine_time, others_share, usages
from triptych.base.errors import TriptychError
from triptych.base.types import JsonObject
from triptych_bench.goodput.load.job import Target
from triptych_bench.goodput.load.workload import Arrivals
from triptych_bench.goodput.measure.search import SearchLimits
from triptych_bench.goodput.measure.slo import preset
from triptych_bench.goodput.measure.window import RunSettings
from triptych_bench.goodput.report.display import Display
from triptych_bench.goodput.report.result import search_fields, window_fields
from triptych_bench.goodput.run import Bench, ready

#: After a start: as many requests with pictures, so that what is compiled or imported late is there.
_SETTLE_REQUESTS = 12
_SETTLE_SEED = 1_999_993
#: Fields of a window that no report reads and that are long.
_BULKY = ("itls", "queue_depths")


class CellFailed(TriptychError):
    """A cell without a figure; the text says why."""


@dataclass(slots=True)
class Measured:
    """What a cell's file gets of its windows."""

    rate: float | None = None
    windows: list[JsonObject] = field(default_factory=list)
    search: JsonObject | None = None
    cpu_shares: dict[str, float] = field(default_factory=dict)
    memory_mb: float = 0.0
    others_share: float = 0.0


def settings_of(matrix: Matrix, cell: Cell, target: Target, seed: int, rate: float | None) -> RunSettings:
    """Of the cell's windows; `rate` is that of the fixed window, or the first of the search."""
    workload = preset(cell.load).workload
    base = RunSettings(
        target=target,
        workload=replace(workload, content=matrix.content or workload.content),
        workload_name=cell.load,
        slo=matrix.slo(cell.load),
        seed=seed,
    )
    if cell.kind == "capacity":
        asked = matrix.capacity
        return replace(base, concurrency=asked.concurrency, requests=asked.requests)
    assert rate is not None
    if cell.kind == "fixed":
        return replace(
            base,
            arrivals=Arrivals(rate=rate),
            requests=window_requests(matrix, rate),
            warm_up=matrix.fixed.warm_up,
        )
    return replace(
        base, arrivals=Arrivals(rate=rate), seconds=matrix.search.seconds, warm_up=matrix.search.warm_up
    )


def rate_of(matrix: Matrix, cell: Cell, finished: Collection[JsonObject]) -> float | None:
    """None for a closed loop. CellFailed when what the rate comes from is not measured."""
    if cell.kind == "capacity":
        return None
    if cell.kind == "fixed":
        rate = fixed_rate(matrix, cell.load, finished)
    else:
        rate = search_start(matrix, cell, finished)
    if rate is None:
        raise CellFailed(
            f"no rate: the capacity of {matrix.capacity.of} on {cell.load} is not measured "
            f"(--retry-failed, or rates.{cell.load} in the file)"
        )
    return rate


def target_of(url: str) -> Target:
    """The server at `url`; several, joined by commas, take requests in turn."""
    first, *others = url.split(",")
    return Target(first, "", replicas=tuple(others))


def warm_up(server: Server, display: Display) -> None:
    """A short closed loop with pictures, not measured."""
    load = "images-4"
    asked = ready(
        RunSettings(
            target=target_of(server.url),
            workload=preset(load).workload,
            workload_name=load,
            slo=preset(load).slo,
            concurrency=4,
            requests=_SETTLE_REQUESTS,
            seed=_SETTLE_SEED,
        )
    )
    window = Bench(asked, display).window(asked)
    if not window.figures.completed:
        raise CellFailed(f"answers no request: {window.report.records[0].error}")


def measure_cell(
    matrix: Matrix, cell: Cell, server: Server, attempt: int, display: Display, result: Measured
) -> None:
    """Fills `found`, whose rate is set. CellFailed when no request was answered."""
    target = target_of(server.url)
    settings = ready(settings_of(matrix, cell, target, seed_of(cell, attempt), result.rate))
    bench = Bench(settings, display)
    before, busy, begun = usages(server.pids), machine_time(), time.monotonic()
    if cell.kind == "search":
        assert result.rate is not None
        limits = SearchLimits(
            start=result.rate,
            resolution=matrix.search.resolution,
            windows=matrix.search.windows,
            confirmations=matrix.search.confirmations,
        )
        result.search = search_fields(bench.search(limits))
    else:
        bench.window(settings)
    wall = time.monotonic() - begun
    result.others_share = others_share(busy, machine_time())
    after = usages(server.pids, memory=True)
    result.cpu_shares = cpu_shares(before, after, wall)
    result.memory_mb = round(sum(usage.memory_mb for usage in after.values()), 1)
    windows = [window_fields(window) for window in bench.windows]
    result.windows = [{key: window[key] for key in window if key not in _BULKY} for window in windows]
    if not any(window["completed"] for window in result.windows):
        raise CellFailed(f"no request was answered: {bench.windows[0].report.records[-1].error}")


#: A search begins below a rate that was not sustained, and at one that was.
_BELOW = 0.6
#: Seconds, before a cell of the kind has been finished.
FIRST_GUESS = {"capacity": 45.0, "fixed": 90.0, "search": 420.0}


def done_cells(finished: Collection[JsonObject], **wanted: str) -> list[JsonObject]:
    """Those that are measured, of the `wanted` kind, load and system."""
    return [
        result
        for result in finished
        if result["status"] == "done" and all(result["cell"][name] == value for name, value in wanted.items())
    ]


def fixed_rate(matrix: Matrix, load: str, finished: Collection[JsonObject]) -> float | None:
    """Requests per second for every system and repeat alike; None while there is no capacity.

    A rate that a fixed cell has been measured with stays, whatever capacities come later.
    """
    if load in matrix.rates:
        return matrix.rates[load]
    for result in done_cells(finished, kind="fixed", load=load):
        return float(result["rate"])
    capacities = [
        float(result["windows"][0]["request_throughput"])
        for result in done_cells(finished, kind="capacity", load=load, system=matrix.capacity.of)
    ]
    return statistics.median(capacities) * matrix.fixed.share if capacities else None


def search_start(matrix: Matrix, cell: Cell, finished: Collection[JsonObject]) -> float | None:
    """The first rate of a search: what this system did at the fixed rate says on which side to begin."""
    rate = fixed_rate(matrix, cell.load, finished)
    if rate is None:
        return None
    fixed = done_cells(finished, kind="fixed", load=cell.load, system=cell.system)
    sustained = [bool(result["windows"][0]["sustained"]) for result in fixed]
    return rate * _BELOW if sustained and 2 * sum(sustained) < len(sustained) else rate


def window_requests(matrix: Matrix, rate: float) -> int:
    """Of a fixed window: until its number of requests, at most its seconds."""
    return max(min(matrix.fixed.requests, round(rate * matrix.fixed.seconds)), 5)


def estimate(cell: Cell, finished: Collection[JsonObject]) -> float:
    """Seconds: the median of finished cells of the kind on this load by this system, on this load, of the
    kind; whichever there is first."""
    wanted = {"kind": cell.kind, "load": cell.load, "system": cell.system}
    for names in (("kind", "load", "system"), ("kind", "load"), ("kind",)):
        alike = done_cells(finished, **{name: wanted[name] for name in names})
        walls = [result["wall_s"] for result in alike]
        if walls:
            return float(statistics.median(walls))
    return FIRST_GUESS[cell.kind]


def seconds_left(cells: Iterable[Cell], finished: Collection[JsonObject]) -> float:
    return sum(estimate(cell, finished) for cell in cells)

"""The loop over cells: finished ones are skipped, failures recorded."""

from __future__ import annotations

import datetime
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TypeVar

from rich.console import Console

from benchmarks.baselines.cell import Cell, CellFiles
from benchmarks.baselines.matrix import Matrix, System, asked_of
from benchmarks.baselines.measure import (
    CellFailed,
    Measured,
    measure_cell,
    rate_of,
    seconds_left,
    warm_up,
)
from benchmarks.baselines.servers import Server, ServerPool
from triptych.base.errors import ConfigError, TriptychError
from triptych.base.progress import Progress, duration
from triptych.base.types import JsonObject
from triptych_bench.goodput.report.display import Display
from triptych_bench.goodput.report.machine import describe, load_average

C = TypeVar("C")


def run_command(work: Callable[[Display], bool]) -> int:
    """The exit status of a command line: 0 when `work` did all of it, 1 when not, 2 for bad input."""
    # Servers end with this process, by SIGTERM too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    display = Display(Console(soft_wrap=True))
    try:
        return 0 if work(display) else 1
    except ConfigError as error:
        display.warn(str(error))
        return 2


def run_cells(
    pool: ServerPool,
    cells: Sequence[C],
    measure: Callable[[C], object],
    system_of: Callable[[C], System],
    display: Display,
    *,
    minutes: float = 0.0,
    expected: Callable[[Sequence[C]], float] = lambda cells: 0.0,
) -> bool:
    """Measures the cells in their order, one system computing at a time: whether there was time for all.

    `expected`: seconds that cells take; with `minutes` none begins that would end after them. A system ends
    after its last cell.
    """
    began = time.monotonic()
    try:
        with Progress("all cells", len(cells), "cells") as progress:
            for index, cell in enumerate(cells):
                seconds = expected([cell])
                if minutes and time.monotonic() - began + seconds > minutes * 60:
                    display.warn(f"{cell} would take {duration(seconds)}: no time left for it")
                    return False
                progress.advance(0, left=expected(cells[index:]) or None)
                system = system_of(cell)
                try:
                    measure(cell)
                finally:
                    pool.pause(system)
                progress.advance()
                if system.name not in {system_of(other).name for other in cells[index + 1 :]}:
                    pool.end(system.name)
        return True
    finally:
        pool.close()


def started_pool(matrix: Matrix, display: Display) -> ServerPool:
    """A pool whose servers say when they are ready, and are warm then."""

    def after_start(system: System, server: Server) -> None:
        display.say(f"{system.name}: ready after {server.seconds_to_ready:.1f} s")
        warm_up(server, display)

    return ServerPool(matrix.model, after_start)


class MatrixRun:
    """Measures the cells that are left, in their order; with `minutes` none that would end after them."""

    def __init__(
        self,
        matrix: Matrix,
        cells: Sequence[Cell],
        files: CellFiles,
        display: Display,
        minutes: float = 0.0,
        retry_failed: bool = False,
    ) -> None:
        self._matrix = matrix
        self._cells = cells
        self._files = files
        self._minutes = minutes
        self._retry_failed = retry_failed
        self._display = display
        self._pool = started_pool(matrix, display)
        self._load_at_start = load_average()

    def run(self, everything: Sequence[Cell]) -> bool:
        """Whether all cells are done; `everything` is the whole plan, whose rates count also for a part."""
        finished = {_key(result): result for result in self._files.read(everything)}
        self._check_asked(finished.values())
        self._files.write_plan(self._matrix, everything)
        left = [cell for cell in self._cells if self._is_left(finished.get(cell.name))]
        self._display.say(f"{len(self._cells) - len(left)} of {len(self._cells)} cells are there already")

        def measure(cell: Cell) -> None:
            finished[cell.name] = self._cell(cell, finished)
            self._tell(cell, finished[cell.name])

        run_cells(
            self._pool,
            left,
            measure,
            lambda cell: self._matrix.named(cell.system),
            self._display,
            minutes=self._minutes,
            expected=lambda cells: seconds_left(cells, finished.values()),
        )
        return all(finished.get(cell.name, {}).get("status") == "done" for cell in self._cells)

    def _check_asked(self, finished: Iterable[JsonObject]) -> None:
        for result in finished:
            cell = Cell(**result["cell"])
            asked = asked_of(self._matrix, cell.kind, cell.load, cell.system)
            if result["status"] == "done" and result["asked"] != asked:
                raise ConfigError(
                    f"{self._files.path(cell)} was measured with other settings than the file has now: "
                    "use another --results folder, or remove it"
                )

    def _is_left(self, result: JsonObject | None) -> bool:
        return result is None or (result["status"] == "failed" and self._retry_failed)

    def _cell(self, cell: Cell, finished: dict[str, JsonObject]) -> JsonObject:
        """Measures, writes, returns what was written."""
        attempt = finished[cell.name]["attempt"] + 1 if cell.name in finished else 1
        system = self._matrix.named(cell.system)
        server: Server | None = None
        measured, why, tail = Measured(), "", ""
        begun, date, load_before = time.monotonic(), _date(), load_average()
        try:
            measured.rate = rate_of(self._matrix, cell, finished.values())
            server = self._pool.get(system)
            server.empty_scratch()
            measure_cell(self._matrix, cell, server, attempt, self._display, measured)
            if not server.alive():
                raise CellFailed("the server died")
        except (TriptychError, OSError) as error:
            why = str(error) or type(error).__name__
            tail = server.log_tail() if server else ""
        wall = time.monotonic() - begun
        machine = describe(load_before)
        result = {
            "cell": asdict(cell),
            "asked": asked_of(self._matrix, cell.kind, cell.load, cell.system),
            "status": "failed" if why else "done",
            "why": why,
            "log_tail": tail,
            "attempt": attempt,
            "date": date,
            "wall_s": wall,
            **asdict(measured),
            "slo": dict(self._matrix.slo(cell.load).limits),
            "machine": asdict(machine) | {"load_at_start": self._load_at_start},
            "server": _server_fields(server),
        }
        self._files.write(cell, result)
        return result

    def _tell(self, cell: Cell, result: JsonObject) -> None:
        if result["status"] == "failed":
            self._display.warn(f"{cell.name} FAILED: {result['why'][:500]}")
        else:
            figures = _figures(result, self._matrix.tail)
            self._display.say(f"{cell.name}: {figures}; {duration(result['wall_s'])}")


def _figures(result: JsonObject, tail: int) -> str:
    if result["search"]:
        return f"{result['search']['max_request_goodput']:.3g}/s sustained"
    window = result["windows"][0]
    latencies = ", ".join(
        f"P{tail} {name.upper()} {window[f'p{tail}_{name}_ms']:.0f} ms" for name in ("ttft", "tpot")
    )
    return (
        f"{window['label']}, {window['request_throughput']:.2f} req/s, {latencies}, "
        f"attained {window['slo_attainment']:.1%}, {window['failed']} failed"
    )


def _server_fields(server: Server | None) -> JsonObject | None:
    if server is None:
        return None
    return {
        "command": server.command,
        "pids": list(server.pids),
        "seconds_to_ready": round(server.seconds_to_ready, 2),
    }


def _key(result: JsonObject) -> str:
    return Cell(**result["cell"]).name


def _date() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")

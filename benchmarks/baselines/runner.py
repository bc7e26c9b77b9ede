"""The loop over cells: finished ones are skipped, failures recorded."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from benchmarks.baselines.cell import Cell, CellFiles
from benchmarks.baselines.matrix import Matrix, System, asked_of
from benchmarks.baselines.measure import (
    CellFailed,
    Measured,
    estimate,
    format_duration,
    measure_cell,
    rate_of,
    seconds_left,
    warm_up,
)
from benchmarks.baselines.servers import Server, ServerPool, idle_shares
from triptych.base.errors import ConfigError, TriptychError
from triptych.base.types import JsonObject
from triptych.goodput.report.display import Display
from triptych.goodput.report.machine import describe, load_average

#: Cores that all idle servers together may take before they are listed.
IDLE_LIMIT = 0.02
IDLE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Options:
    """`minutes` 0: no limit. `restart_each`: a server serves one cell only."""

    minutes: float = 0.0
    restart_each: bool = False
    retry_failed: bool = False


class MatrixRun:
    """Measures the cells that are left, in their order."""

    def __init__(
        self, matrix: Matrix, cells: Sequence[Cell], files: CellFiles, options: Options, display: Display
    ) -> None:
        self._matrix = matrix
        self._cells = cells
        self._files = files
        self._options = options
        self._display = display
        self._pool = ServerPool(matrix.model, self._warm_up)
        self._load_at_start = load_average()
        self._began = time.monotonic()

    def run(self, everything: Sequence[Cell]) -> bool:
        """Whether all cells are done; `everything` is the whole plan, whose rates count also for a part."""
        finished = {_key(found): found for found in self._files.read(everything)}
        self._check_asked(finished.values())
        self._files.write_plan(self._matrix, everything)
        left = self._left(finished)
        self._display.say(f"{len(self._cells) - len(left)} of {len(self._cells)} cells are there already")
        idle_checked = False
        cells = self._display.step("all cells", len(left), "cells")
        cells.advance(0, left=seconds_left(left, list(finished.values())))
        try:
            for index, cell in enumerate(left):
                expected = estimate(cell, list(finished.values()))
                if not self._fits(expected):
                    self._display.warn(
                        f"{cell.name} would take {format_duration(expected)}: no time left for it"
                    )
                    break
                found = self._cell(cell, finished)
                finished[cell.name] = found
                self._pool.pause(self._matrix.named(cell.system))
                rest = seconds_left(left[index + 1 :], list(finished.values()))
                cells.advance(left=rest)
                self._tell(cell, found, len(left) - index - 1, rest)
                if not idle_checked and index + 1 < len(left) and self._all_up(left[index + 1 :]):
                    idle_checked = True
                    self._check_idle()
                self._end_unneeded(cell, left[index + 1 :])
            else:
                cells.finish()
        finally:
            cells.finish(failed=True)
            self._pool.close()
        return all(cell.name in finished and finished[cell.name]["status"] == "done" for cell in self._cells)

    def _check_asked(self, finished: Iterable[JsonObject]) -> None:
        for found in finished:
            cell = Cell(**found["cell"])
            asked = asked_of(self._matrix, cell.kind, cell.load, cell.system)
            if found["status"] == "done" and found["asked"] != asked:
                raise ConfigError(
                    f"{self._files.path(cell)} was measured with other settings than the file has now: "
                    "use another --results folder, or remove it"
                )

    def _left(self, finished: dict[str, JsonObject]) -> list[Cell]:
        def open_(cell: Cell) -> bool:
            found = finished.get(cell.name)
            return found is None or (found["status"] == "failed" and self._options.retry_failed)

        return [cell for cell in self._cells if open_(cell)]

    def _fits(self, seconds: float) -> bool:
        limit = self._options.minutes * 60
        return not limit or time.monotonic() - self._began + seconds <= limit

    def _cell(self, cell: Cell, finished: dict[str, JsonObject]) -> JsonObject:
        """Measures, writes, returns what was written."""
        attempt = finished[cell.name]["attempt"] + 1 if cell.name in finished else 1
        system = self._matrix.named(cell.system)
        server: Server | None = None
        measured, why, tail = Measured(), "", ""
        begun, date, load_before = time.monotonic(), _date(), load_average()
        try:
            measured.rate = rate_of(self._matrix, cell, list(finished.values()))
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
        found = {
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
        self._files.write(cell, found)
        return found

    def _warm_up(self, system: System, server: Server) -> None:
        self._display.say(f"{system.name}: ready after {server.seconds_to_ready:.1f} s")
        warm_up(server, self._display)

    def _all_up(self, left: Sequence[Cell]) -> bool:
        lasting = {cell.system for cell in left if not self._matrix.named(cell.system).brief}
        return not self._options.restart_each and lasting <= set(self._pool.running())

    def _check_idle(self) -> None:
        shares = idle_shares(self._pool.running(), IDLE_SECONDS)
        text = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        if sum(shares.values()) > IDLE_LIMIT:
            self._display.warn(f"idle servers take {sum(shares.values()):.1%} of a core: {text}")
        else:
            self._display.say(f"idle servers take of a core: {text}")

    def _end_unneeded(self, cell: Cell, left: Sequence[Cell]) -> None:
        brief = self._matrix.named(cell.system).brief or self._options.restart_each
        if brief or cell.system not in {other.system for other in left}:
            self._pool.end(cell.system)

    def _tell(self, cell: Cell, found: JsonObject, left: int, seconds: float) -> None:
        done = f"{len(self._cells) - left} of {len(self._cells)}"
        rest = format_duration(seconds)
        if found["status"] == "failed":
            self._display.warn(f"{cell.name} FAILED: {found['why'][:500]}")
        else:
            self._display.say(f"{cell.name}: {_figures(found, self._matrix.tail)}")
        self._display.say(f"  {format_duration(found['wall_s'])}; {done} cells, about {rest} left")


def _figures(found: JsonObject, tail: int) -> str:
    if found["search"]:
        return f"{found['search']['max_request_goodput']:.3g}/s sustained"
    window = found["windows"][0]
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


def _key(found: JsonObject) -> str:
    return Cell(**found["cell"]).name


def _date() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")

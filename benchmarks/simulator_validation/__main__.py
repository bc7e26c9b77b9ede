"""The simulator against real clusters on this machine: TTFT, TPOT, throughput, in as many shapes as it knows.

    triptych profile MODEL --output profile.json          # on the same, quiet machine
    python -m benchmarks simulator_validation MODEL --profile profile.json --results DIR [--minutes N]

DIR gets a JSON file per window: a run that was cut off goes on where it ended. In every round each system is
started anew and warmed up. The table is made of all windows that are there (`--only-report` measures
nothing). `closed` keeps a number of requests in flight, `open` sends at a share of the throughput that the
system's first closed run had. Every worker has a core of its own: the machine needs as many as a system has
workers, and the systems that it has no cores for are left out.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.simulator_validation.comparison import (
    KINDS,
    LOADS,
    METRICS,
    SYSTEMS,
    Comparison,
    ValidatedSystem,
    ValidationCell,
    compare,
    plan_cells,
    systems_for,
    table,
)
from triptych.config import EncoderConfig
from triptych.cpu.threads import thread_environment
from triptych.errors import ConfigError
from triptych.goodput.launch import launched, parse_shape
from triptych.goodput.load.arrivals import Arrivals
from triptych.goodput.load.job import Target
from triptych.goodput.measure.figures import WindowFigures, summarise
from triptych.goodput.measure.presets import preset
from triptych.goodput.measure.settings import RunSettings, make_job
from triptych.goodput.measure.window import measure
from triptych.goodput.report.machine import LOADED_SHARE, load_average
from triptych.goodput.run import ready
from triptych.simulator.cluster.shape import Limits
from triptych.simulator.costs.costs import CostModel, ModelShape, read_costs, read_shape
from triptych.simulator.run import simulate

FORMAT = "triptych-validation/3"
#: Seconds of a window, before one has been measured; and of a cluster's start.
_GUESS, _START = 20.0, 8.0
_BY_NAME = {system.name: system for system in SYSTEMS}


def settings_of(cell: ValidationCell, options: argparse.Namespace, rate: float = 1.0) -> RunSettings:
    """What the load generator and the simulator have in common; `rate` is for open windows."""
    chosen = preset(cell.load)
    closed = options.concurrency if cell.kind == "closed" else 0
    return RunSettings(
        target=Target("http://127.0.0.1", ""),
        workload=chosen.workload,
        workload_name=cell.load,
        slo=chosen.slo,
        arrivals=Arrivals("poisson", rate),
        concurrency=closed,
        requests=options.requests,
        warm_up=0.0 if closed else 8 / rate,
    )


def seed_of(cell: ValidationCell) -> int:
    """No two windows of a cluster share a picture or a text."""
    return zlib.crc32(cell.name.encode()) % 1_000_000


def figures_of(found: WindowFigures) -> dict[str, float]:
    """Medians over requests in seconds, and requests per second."""
    return {
        "ttft": found.spreads["ttft"].median,
        "tpot": found.spreads["tpot"].median,
        "throughput": found.throughput,
    }


def simulated(
    cell: ValidationCell, options: argparse.Namespace, rate: float, costs: CostModel, sizes: ModelShape
) -> dict[str, float]:
    """The figures of the same window, simulated."""
    settings = settings_of(cell, options, rate)
    job = make_job(settings, seed_of(cell))
    result = simulate(
        [request for _, request in job.schedule],
        [at for at, _ in job.schedule],
        _BY_NAME[cell.system].shape,
        costs,
        sizes,
        seed=seed_of(cell),
        warm_up=job.warm_up,
        concurrency=job.concurrency,
        limits=Limits(encoder=EncoderConfig()),
    )
    return figures_of(summarise(result.records, settings.slo))


class Windows:
    """The measured windows in a folder, one file each, whole or not there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, cell: ValidationCell) -> dict[str, Any] | None:
        path = self._path(cell)
        if not path.exists():
            return None
        found: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        if found.get("format") != FORMAT:
            raise ConfigError(f"{path} is no {FORMAT}: remove it")
        return found

    def write(self, cell: ValidationCell, found: dict[str, Any]) -> None:
        path = self._path(cell)
        draft = path.with_suffix(".draft")
        draft.write_bytes(msgspec.json.format(msgspec.json.encode({"format": FORMAT} | found), indent=1))
        draft.replace(path)

    def rate(self, cell: ValidationCell, share: float) -> float:
        """Of an open window: a share of the throughput of the first closed one."""
        closed = self.read(replace(cell, kind="closed", repeat=0))
        if closed is None:
            raise ConfigError(
                f"{cell.name} needs its closed window first: measure without --kind {cell.kind}"
            )
        return round(share * float(closed["figures"]["throughput"]), 2)

    def _path(self, cell: ValidationCell) -> Path:
        return self._folder / f"{cell.name}.json"


def measure_all(
    cells: Sequence[ValidationCell],
    windows: Windows,
    options: argparse.Namespace,
    say: Callable[[str], None],
) -> bool:
    """Measures what is not there yet, one cluster after the other; False when the time was over before."""
    left = [cell for cell in cells if windows.read(cell) is None]
    end = time.monotonic() + options.minutes * 60 if options.minutes else float("inf")
    walls: list[float] = []
    for (name, _), group in groupby(tuple(left), key=lambda cell: (cell.system, cell.repeat)):
        todo = list(group)
        if time.monotonic() + _START + _guess(walls) > end:
            return False
        with _cluster(_BY_NAME[name], options) as url:
            _warm_up(todo[0], options, url)
            for cell in todo:
                if time.monotonic() + _guess(walls) > end:
                    return False
                began = time.monotonic()
                found = _measured(cell, windows, options, url)
                windows.write(cell, found)
                walls.append(time.monotonic() - began)
                left.remove(cell)
                starts = len({(other.system, other.repeat) for other in left})
                minutes = (len(left) * _guess(walls) + _START * starts) / 60
                say(f"{cell.name}: {found['figures']}; {len(left)} windows left, about {minutes:.0f} min")
    return True


def _guess(walls: Sequence[float]) -> float:
    return sum(walls) / len(walls) if walls else _GUESS


@contextmanager
def _cluster(system: ValidatedSystem, options: argparse.Namespace) -> Iterator[str]:
    with launched(parse_shape(system.launch), options.model, system.words) as cluster:
        yield cluster.url


def _warm_up(cell: ValidationCell, options: argparse.Namespace, url: str) -> None:
    """A few requests, not measured: the first ones of a process find nothing in its caches."""
    closed = settings_of(replace(cell, kind="closed"), options)
    target = replace(closed.target, url=url)
    measure(ready(replace(closed, target=target, requests=2 * options.concurrency)), seed_of(cell) + 1)


def _measured(
    cell: ValidationCell, windows: Windows, options: argparse.Namespace, url: str
) -> dict[str, Any]:
    rate = windows.rate(cell, options.share) if cell.kind == "open" else 1.0
    settings = settings_of(cell, options, rate)
    settings = ready(replace(settings, target=replace(settings.target, url=url)))
    load = load_average()
    window = measure(settings, seed_of(cell))
    if window.figures.failed:
        raise ConfigError(f"{cell.name}: {window.figures.failed} requests failed: nothing to compare")
    return {
        "cell": cell.name,
        "rate": rate,
        "figures": figures_of(window.figures),
        "doubts": list(window.doubts),
        "load_before": load,
    }


def compared(
    cells: Sequence[ValidationCell], windows: Windows, options: argparse.Namespace
) -> dict[tuple[str, str, str], list[Comparison]]:
    """Every system, load and kind of which windows are there; each is simulated too."""
    costs, sizes = read_costs(options.profile), read_shape(options.profile)
    found: dict[tuple[str, str, str], list[Comparison]] = {}
    groups: dict[tuple[str, str, str], list[ValidationCell]] = {}
    for cell in cells:
        groups.setdefault((cell.system, cell.load, cell.kind), []).append(cell)
    for key, group in groups.items():
        there = [(cell, taken) for cell in group if (taken := windows.read(cell)) is not None]
        if there:
            real = [taken["figures"] for _, taken in there]
            made = [simulated(cell, options, taken["rate"], costs, sizes) for cell, taken in there]
            found[key] = [compare(metric, real, made) for metric in METRICS]
    return found


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("model", nargs="?", default="", help="checkpoint folder; the demo model by default")
    found.add_argument("--profile", type=Path, required=True, help="of `triptych profile` on this machine")
    found.add_argument("--results", type=Path, required=True, help="folder of the windows")
    found.add_argument("--system", action="append", choices=sorted(_BY_NAME), help="all by default")
    found.add_argument("--load", action="append", help=f"presets; {', '.join(LOADS)} by default")
    found.add_argument("--kind", action="append", choices=KINDS, help="all by default")
    found.add_argument("--repeats", type=int, default=5)
    found.add_argument("--requests", type=int, default=80, help="measured in a window")
    found.add_argument("--concurrency", type=int, default=8, help="of closed windows")
    found.add_argument(
        "--share", type=float, default=0.6, help="rate of open windows, of the closed throughput"
    )
    found.add_argument("--minutes", type=float, default=0.0, help="stop before a window that would not fit")
    found.add_argument("--only-report", action="store_true", help="measure nothing")
    found.add_argument("--output", type=Path, help="file for the table")
    return found


def main(arguments: list[str] | None = None) -> int:
    """0 when everything was measured and every comparison passed, 1 when not, 2 for bad input."""
    options = parser().parse_args(arguments)
    try:
        systems = options.system or [system.name for system in systems_for(len(os.sched_getaffinity(0)))]
        cells = plan_cells(systems, options.load or LOADS, options.repeats)
        cells = [cell for cell in cells if cell.kind in (options.kind or KINDS)]
        windows = Windows(options.results)
        read_costs(options.profile)
        done = options.only_report or _measure(cells, windows, options)
        found = compared(cells, windows, options)
    except ConfigError as error:
        sys.stderr.write(f"simulator_validation: {error}\n")
        return 2
    taken = {cell: window for cell in cells if (window := windows.read(cell)) is not None}
    loaded = [cell for cell, window in taken.items() if _loaded(window)]
    text = table(found)
    if loaded:
        text += (
            f"\n{len(loaded)} windows, the first {loaded[0].name}, began on a LOADED MACHINE, by a load "
            "average in which the windows before count."
        )
    _say(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    return 0 if done and all(one.passed for metrics in found.values() for one in metrics) else 1


def _measure(cells: Sequence[ValidationCell], windows: Windows, options: argparse.Namespace) -> bool:
    thread_environment()
    return measure_all(cells, windows, options, _say)


def _loaded(found: dict[str, Any]) -> bool:
    return float(found["load_before"]) > LOADED_SHARE * len(os.sched_getaffinity(0))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())

"""How late the goodput harness's load generator sends, and what of a core it takes, against a null server.

    python -m benchmarks.micro.generator_lateness [--rate 200] [--seconds 20] [--repeats 5] [--write]

The null server is a process of its own that streams 16 tokens a reply and computes nothing. Lateness is the
time from a request's planned moment to the call that sends it. The goal is 2 ms at P99 and 200 requests/s.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import subprocess
import sys

from benchmarks.result_page import RESULTS, add_write_flag, publish
from triptych.goodput.load.arrivals import Arrivals, arrival_times
from triptych.goodput.load.job import LoadJob, Target, WindowReport
from triptych.goodput.load.processes import run_window
from triptych.goodput.load.workload import Workload, plan_requests
from triptych.goodput.measure.figures import WindowFigures, summarise
from triptych.goodput.measure.slo import Slo
from triptych.goodput.null_server import MODEL
from triptych.goodput.report.machine import describe, load_average

RESULT = RESULTS / "generator_lateness.md"
TARGET_SECONDS = 0.002
LOADS = {
    "text": Workload(32, 16),
    "one picture of 320x320": Workload(32, 16, ((1, 1.0),), ((320, 320, 1.0),)),
}


def measure(
    url: str, load: Workload, rate: float, seconds: float, seed: int
) -> tuple[WindowReport, WindowFigures]:
    """One window, its first tenth as warm-up."""
    count = round(rate * seconds)
    times = arrival_times(Arrivals(rate=rate), count, seed)
    schedule = tuple(zip(times, plan_requests(load, count, seed), strict=True))
    report = run_window(LoadJob(Target(url, MODEL), schedule, warm_up=count // 10))
    return report, summarise(report.records, Slo())


def row(name: str, runs: list[tuple[WindowReport, WindowFigures]]) -> str:
    late = [figures.lateness.percentiles for _, figures in runs]
    middle = [statistics.median(ranks) * 1000 for ranks in zip(*late, strict=True)]
    worst = max(ranks[2] for ranks in late) * 1000
    cpu = statistics.median(report.cpu_share for report, _ in runs)
    failed = sum(figures.failed for _, figures in runs)
    ranks = " | ".join(f"{value:.2f}" for value in (*middle, worst))
    return f"| {name} | {ranks} | {cpu:.0%} | {failed} |"


def report(rows: list[str], options: argparse.Namespace, load_before: float, reached: bool) -> str:
    machine = describe(load_before)
    words = f"--rate {options.rate:g} --seconds {options.seconds:g} --repeats {options.repeats} --write"
    marked = "**This machine was loaded: the figures say what it costs here and now, not what the tool can.**"
    lines = [
        "# Lateness of the load generator",
        "",
        f"Command: `python -m benchmarks.micro.generator_lateness {words}`",
        f"Date: {datetime.date.today()}. Commit: {machine.commit}. "
        f"Chip: {machine.chip}, {machine.cores} cores. "
        f"Load before: {machine.load_before}, after: {machine.load_after}.",
        *([marked] if machine.loaded else []),
        "",
        f"{options.rate:g} requests/s, Poisson, {options.seconds:g} s a window, 16 tokens a reply,",
        f"medians of {options.repeats} windows; milliseconds from the planned moment to the call that sends.",
        "",
        "| load | P50 | P90 | P99 | worst window's P99 | generator's CPU | failed |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        f"Target: P99 of {TARGET_SECONDS * 1000:.0f} ms, {'reached' if reached else 'not reached'} by the "
        "medians of this run.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=5)
    add_write_flag(parser, RESULT)
    options = parser.parse_args()
    load_before = load_average()
    command = [sys.executable, "-m", "triptych.goodput.null_server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        try:
            runs = {
                name: [
                    measure(url, load, options.rate, options.seconds, seed) for seed in range(options.repeats)
                ]
                for name, load in LOADS.items()
            }
        finally:
            server.terminate()
    rows = [row(name, found) for name, found in runs.items()]
    tails = [statistics.median(f.lateness.percentiles[2] for _, f in found) for found in runs.values()]
    text = report(rows, options, load_before, max(tails) <= TARGET_SECONDS)
    publish(text, RESULT, write=options.write)


if __name__ == "__main__":
    main()

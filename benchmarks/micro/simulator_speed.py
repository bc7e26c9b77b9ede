"""How many requests the simulator takes per CPU second, and what taking runs of steps at once is worth.

    python -m benchmarks simulator_speed [--requests 1000] [--repeats 3] [--against FOLDER] [--write]

The published random-mm load with short texts (400 tokens, a picture of 640x640, 150 output tokens) and
texts alone, on A100s by their published costs. CPU time, not wall clock. The goal is 500 requests per second
and core at 150 output tokens. `--against` names a checkout of another commit: its windows and ours take
turns, in two processes.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.result_page import RESULTS, add_write_flag, publish
from triptych.config import GIB, PDConfig, ProxyConfig
from triptych.goodput.load.arrivals import Arrivals, arrival_times
from triptych.goodput.load.workload import Workload, plan_requests
from triptych.goodput.measure.figures import summarise
from triptych.goodput.measure.presets import preset
from triptych.goodput.measure.slo import Slo
from triptych.goodput.report.machine import describe, load_average
from triptych.simulator.cluster.shape import ClusterShape, Limits, colocated, on_devices
from triptych.simulator.costs.published import QWEN3_VL_4B_SHAPE, published
from triptych.simulator.result import Simulation
from triptych.simulator.run import simulate

RESULT = RESULTS / "simulator_speed.md"
GOAL = 500
PICTURES = preset("short-1").workload
TEXTS = replace(PICTURES, images=((0, 1.0),))
CASES: tuple[tuple[str, ClusterShape, Workload, float], ...] = (
    ("texts, 1E1PD, 8/s", on_devices(1, 1), TEXTS, 8.0),
    ("pictures, 1E1PD, 8/s", on_devices(1, 1), PICTURES, 8.0),
    ("pictures, 1E3PD, 24/s", on_devices(1, 3), PICTURES, 24.0),
    ("pictures, 4 colocated, 24/s", colocated(4), PICTURES, 24.0),
    ("pictures, 8E24PD, 160/s", on_devices(8, 24), PICTURES, 160.0),
)
LIMITS = Limits(
    proxy=ProxyConfig(max_queue=100_000),
    pd=PDConfig(
        kv_memory=20 * GIB, max_num_seqs=256, max_num_batched_tokens=2048, encoder_cache_memory=4 * GIB
    ),
    store_memory=64 * GIB,
)


#: The process of one checkout: a window of the case whose number is read. This file was one folder higher.
_WINDOWS = """
import importlib, sys
from pathlib import Path
here = "benchmarks.micro" if Path("benchmarks/micro").is_dir() else "benchmarks"
speed, count = importlib.import_module(here + ".simulator_speed"), int(sys.argv[1])
for line in sys.stdin:
    print(speed.window(*speed.CASES[int(line)][1:], count, speed.LIMITS)[0], flush=True)
"""


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One case: requests per CPU second, with and without runs of steps taken at once."""

    name: str
    rates: list[float]
    step_by_step: float
    found: Simulation


def window(
    shape: ClusterShape, load: Workload, rate: float, count: int, limits: Limits
) -> tuple[float, Simulation]:
    """(requests per CPU second, what was found)."""
    requests, times = plan_requests(load, count, 0), arrival_times(Arrivals(rate=rate), count, 0)
    costs = published("a100-80g")
    began = time.process_time()
    found = simulate(requests, times, shape, costs, QWEN3_VL_4B_SHAPE, limits)
    return count / (time.process_time() - began), found


def measure(case: tuple[str, ClusterShape, Workload, float], count: int, repeats: int) -> TimedRun:
    name, shape, load, rate = case
    runs = [window(shape, load, rate, count, LIMITS) for _ in range(repeats)]
    slow, _ = window(shape, load, rate, max(count // 4, 1), replace(LIMITS, jumps=False))
    return TimedRun(name, [rate for rate, _ in runs], slow, runs[0][1])


def ratios(folder: Path, count: int, rounds: int) -> dict[str, list[float]]:
    """By case and round: our requests per CPU second over those of the checkout in `folder`.

    The first round warms both up.
    """
    found: dict[str, list[float]] = {name: [] for name, *_ in CASES}
    with ExitStack() as stack:
        both = [stack.enter_context(_process(tree, count)) for tree in (Path.cwd(), folder)]
        for number in range(rounds + 1):
            for index, name in enumerate(found):
                ours, theirs = (_rate(process, index) for process in both)
                if number:
                    found[name].append(ours / theirs)
    return found


def _process(tree: Path, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _WINDOWS, str(count)],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree.absolute())},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _rate(process: subprocess.Popen[str], case: int) -> float:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{case}\n")
    process.stdin.flush()
    if not (rate := process.stdout.readline()):
        raise SystemExit("--against: a checkout's windows cannot be run; its error stands above")
    return float(rate)


def comparison(found: dict[str, list[float]], commit: str) -> list[str]:
    """The ratios as a part of the page."""
    return [
        f"Next to commit {commit}, its windows and these in turns; requests per CPU second, this over that:",
        "",
        "| load | median | range |",
        "|---|---|---|",
        *(
            f"| {name} | **{statistics.median(taken):.2f}** | {min(taken):.2f}–{max(taken):.2f} |"
            for name, taken in found.items()
        ),
        "",
    ]


def row(timed: TimedRun) -> str:
    counters = timed.found.counters
    figures = summarise(timed.found.records, Slo())
    median = statistics.median(timed.rates)
    return (
        f"| {timed.name} | **{median:.0f}** ({min(timed.rates):.0f}–{max(timed.rates):.0f}) "
        f"| {timed.step_by_step:.0f} | {counters.jumped_steps / counters.steps:.0%} "
        f"| {counters.utilisation['pd']:.0%} | {figures.spreads['ttft'].median * 1000:.0f} "
        f"| {figures.spreads['tpot'].median * 1000:.1f} | {figures.failed} |"
    )


def report(rows: list[TimedRun], options: argparse.Namespace, load_before: float) -> str:
    machine = describe(load_before)
    words = f"--requests {options.requests} --repeats {options.repeats} --write"
    below = [timed.name for timed in rows if statistics.median(timed.rates) < GOAL]
    verdict = f"missed by: {'; '.join(below)}" if below else "reached by all"
    lines = [
        "# Speed of the simulator",
        "",
        f"Command: `python -m benchmarks simulator_speed {words}`",
        f"Date: {datetime.date.today()}. Commit: {machine.commit}. "
        f"Chip: {machine.chip}, {machine.cores} cores. "
        f"Load before: {machine.load_before}, after: {machine.load_after}.",
        "",
        "Requests per second of CPU time (one core), 150 output tokens each, medians and range of "
        f"{options.repeats} windows of {options.requests} requests;",
        "costs of an A100 as published. On a loaded machine CPU seconds are longer too: a core's two threads",
        "share it.",
        "",
        "| load | requests per CPU second | step by step | steps in runs | PD busy "
        "| TTFT P50 ms | TPOT P50 ms | failed |",
        "|---|---|---|---|---|---|---|---|",
        *map(row, rows),
        "",
        f"Goal: {GOAL} per second, {verdict}.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--against", type=Path, help="a checkout of the commit to compare with")
    parser.add_argument("--commit", default="", help="its name, for the page")
    add_write_flag(parser, RESULT)
    options = parser.parse_args()
    load_before = load_average()
    text = report([measure(case, options.requests, options.repeats) for case in CASES], options, load_before)
    if options.against:
        found = ratios(options.against, options.requests, options.repeats)
        text = "\n".join([text, *comparison(found, options.commit or options.against.name)])
    publish(text, RESULT, write=options.write)


if __name__ == "__main__":
    main()

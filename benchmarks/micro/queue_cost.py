"""What queued work costs: CPU of the proxy's job table per item, and of the PD scheduler per step.

`--before` names another checkout of this repository: its figures stand beside, measured in turns.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.micro.queue_load import QUEUED, RUNNING, WAITING, WAITING_TEXTS
from benchmarks.result_page import RESULTS, add_write_flag, publish
from triptych.goodput.report.machine import describe, load_average

RESULT = RESULTS / "queue_cost.md"
_ROOT = Path(__file__).parents[2]

Costs = dict[str, float]

_ROWS = {
    "item": "an item's whole life in the proxy's table, items queued: {}",
    "request": "a request's admission and end, items planned: {}",
    "items": "`schedule()`, requests of 16 items that wait for embeddings: {}",
    "room": "`schedule()`, requests of 16 items that wait for room: {}",
    "slots": "`schedule()`, requests of 16 items that wait for a slot: {}",
    "running": "a step but for the model, decoding requests: {}",
    "texts": "a step but for the model, 8 decoding requests, waiting ones: {}",
}
_COUNTS = {
    "item": QUEUED,
    "request": QUEUED,
    "items": WAITING,
    "room": WAITING,
    "slots": WAITING,
    "running": RUNNING,
    "texts": WAITING_TEXTS,
}


def measure(tree: Path) -> Costs:
    """CPU milliseconds by name, in a process that imports the code of `tree`."""
    script = Path(__file__).with_name("queue_load.py")
    found = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        check=True,
        timeout=600.0,
    )
    return dict(json.loads(found.stdout))


def median(runs: list[Costs]) -> Costs:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def commit_of(tree: Path) -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=tree, capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


def report(before: Costs | None, after: Costs, former: str, repeats: int, load_before: float) -> str:
    machine = describe(load_before)
    loaded = " MADE ON A LOADED MACHINE." if machine.loaded else ""
    given = "" if before is None else " --before CHECKOUT"
    lines = [
        "# Cost of queued work",
        "",
        f"Command: `python -m benchmarks queue_cost --repeats {repeats}{given} --write`",
        f"Date: {datetime.date.today()}. Commit: {machine.commit}. Chip: {machine.chip}, "
        f"{machine.cores} cores.",
        f"Load before: {machine.load_before}, after: {machine.load_after}.{loaded}",
        "",
        f"Milliseconds of CPU time, medians of {repeats} runs.",
        "",
    ]
    heads = ("what", "ms") if before is None else ("what", f"before ({former})", "after")
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, text in _ROWS.items():
        for count in _COUNTS[name]:
            key = f"{name} {count}"
            figures = [f"{costs[key]:.3f}" for costs in (before, after) if costs is not None]
            lines.append(f"| {' | '.join((text.format(count), *figures))} |")
    return "\n".join((*lines, ""))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    add_write_flag(parser, RESULT)
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    load_before = load_average()
    befores: list[Costs] = []
    afters: list[Costs] = []
    for _ in range(options.repeats):
        if options.before is not None:
            befores.append(measure(options.before.resolve()))
        afters.append(measure(_ROOT))
    former = "" if options.before is None else commit_of(options.before)
    before = median(befores) if befores else None
    publish(report(before, median(afters), former, options.repeats, load_before), RESULT, write=options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""An encoder pool on one machine follows bursts: time lines, and from zero to the first embedding.

`bursts`: two clusters by `triptych serve --encoders 0..N`, each with the demo model: in the first one an item
sleeps in the tower, so that more encoders are faster though the machine has no more cores; the second one
computes. Each gets bursts of requests with pictures of their own and has to be empty in between. `starts`:
single requests meet an empty pool, with the fork server and without it.

    python -m benchmarks scaling bursts [--tower-seconds 0.5] [--bursts 2] [--requests 12] [--write]
    python -m benchmarks scaling starts [--runs 5] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.micro.back_pressure import sized_model
from benchmarks.result_page import RESULTS, publish
from benchmarks.scaling.bursts import BurstOptions, run_bursts
from benchmarks.scaling.first_start import measure_first_starts
from benchmarks.scaling.plot import save_timeline
from benchmarks.scaling.report import ScalingRun, bursts_page, starts_page
from triptych.config import WorkerCounts
from triptych.goodput.launch import launched

PAGES = {"bursts": RESULTS / "scale_local.md", "starts": RESULTS / "scale_from_zero.md"}
#: Patches the engine of a process that finds it on its path: `tests/support/engine_faults/sitecustomize.py`.
PATCH = Path(__file__).resolve().parents[2] / "tests/support/engine_faults"
START_SECONDS = 180.0


def main() -> None:
    """Measures, prints the page, and writes it with its pictures if asked."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        model = str(sized_model(Path(folder) / "demo", options.side))
        measure = _bursts if options.part == "bursts" else _starts
        publish(measure(model, options), PAGES[options.part], write=options.write)


def _bursts(model: str, options: argparse.Namespace) -> str:
    sizes = BurstOptions(options.bursts, options.requests, options.images, options.side, options.tokens)
    runs = []
    for name, seconds in (("sleeping", options.tower_seconds), ("computing", 0.0)):
        runs.append(run := _run(name, seconds, model, sizes, options))
        pictures = RESULTS if options.write else Path.cwd()
        save_timeline(run.bursts.timeline, run.title, pictures / run.picture)
    return bursts_page(runs, options)


def _starts(model: str, options: argparse.Namespace) -> str:
    # The shortest window: the pool is empty again soon.
    with launched(*_shape(model, 1.0, options), START_SECONDS) as cluster:
        return starts_page(measure_first_starts(cluster, options.runs, options.side), options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=list(PAGES))
    parser.add_argument("--encoders", default="0..4")
    parser.add_argument("--tower-seconds", type=float, default=0.5, help="what an item sleeps in the tower")
    parser.add_argument("--bursts", type=int, default=2)
    parser.add_argument("--requests", type=int, default=12, help="requests of a burst")
    parser.add_argument("--images", type=int, default=4, help="pictures of a request")
    parser.add_argument("--side", type=int, default=384, help="pixels of a picture's side")
    parser.add_argument("--tokens", type=int, default=8, help="output tokens of a request")
    parser.add_argument("--slo", type=float, default=4.0, help="seconds that an item may take in the pool")
    parser.add_argument("--window", type=float, default=8.0, help="seconds before the pool shrinks")
    parser.add_argument("--runs", type=int, default=5, help="starts from zero of each kind")
    parser.add_argument("--write", action="store_true", help="write the page, and its pictures")
    return parser.parse_args()


def _run(
    name: str, seconds: float, model: str, sizes: BurstOptions, options: argparse.Namespace
) -> ScalingRun:
    tower = f"an item sleeps {seconds:g} s in the tower" if seconds else "the demo model's tower"
    title = f"Encoders {options.encoders}, {options.requests} requests of {options.images} pictures, {tower}"
    with _sleeping(seconds), launched(*_shape(model, options.window, options), START_SECONDS) as cluster:
        return ScalingRun(name, title, asyncio.run(run_bursts(cluster, sizes)))


def _shape(model: str, window: float, options: argparse.Namespace) -> tuple[WorkerCounts, str, list[str]]:
    """The shape without encoders, the model, and the words that bring encoders."""
    words = ["--encoders", options.encoders, "--encoder-slo", str(options.slo)]
    words += ["--scale-window", str(window), "--encoder-batch-patches", "1", "--threads", "1"]
    words += ["--kv-memory", "64MiB", "--prepared-memory", "128MiB"]
    return WorkerCounts(encoders=0, pd_workers=1), model, words


@contextlib.contextmanager
def _sleeping(seconds: float) -> Iterator[None]:
    """Clusters that are started meanwhile have towers that sleep so long for each item."""
    before = dict(os.environ)
    if seconds:
        paths = [str(PATCH), *filter(None, [before.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        os.environ["TRIPTYCH_TEST_TOWER_SECONDS"] = str(seconds)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


if __name__ == "__main__":
    main()

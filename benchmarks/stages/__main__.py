"""Each stage of a request in process, beside what the machine could do at best.

    python -m benchmarks stages MODEL [--dtype bfloat16] [--threads 1 2] [--rounds 5] [--write]

MODEL is a Qwen-VL checkpoint. Limits are measured in the same run: bytes read, bytes copied, matrix product.
"""

from __future__ import annotations

import argparse
import os
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.baselines.tables import table
from benchmarks.result_page import RESULTS, add_write_flag, publish
from benchmarks.stages.decoding import CHUNK, CONTEXTS, PROMPT, ROWS, decoding
from benchmarks.stages.encoding import encoding
from benchmarks.stages.work import Limits, Stage, limits
from benchmarks.targets import record
from triptych.base.cpu.threads import use_threads
from triptych.goodput.report.machine import chip, commit

RESULT = RESULTS / "stages.md"


def section(threads: int, found: Limits, stages: list[Stage]) -> list[str]:
    head = ["stage", "ms", "least, ms", "of the limit", "limited by"]
    return [
        f"## {threads} thread{'s' if threads > 1 else ''}",
        "",
        f"Limits: {found.read / 1e9:.1f} GB/s read, {found.copy / 1e9:.1f} GB/s copied, "
        f"{found.product / 1e9:.0f} GFLOP/s in a matrix product of 512 x 1024 x 3072.",
        "",
        *table(head, [stage.row() for stage in stages], texts=(0, 4)),
        "",
    ]


def reached(stages: dict[int, list[Stage]]) -> dict[str, dict[str, float]]:
    """Figures of the targets, of the most threads."""
    found = {stage.name: stage for stage in stages[max(stages)]}
    alone = found["decode step of 1 at context 100"].share
    first, last = (found[f"prefill of {CHUNK} tokens at context {context}"] for context in (0, CONTEXTS[-1]))
    assert alone is not None
    load = next(stage for name, stage in found.items() if name.startswith("load of"))
    path = load.seconds + found[f"inject of {ROWS} rows"].seconds
    return {
        "decode step of 1, small": {"of bandwidth": alone},
        "load and inject, of prefill": {
            "share": path / found[f"prefill of {PROMPT} tokens at context 0"].seconds
        },
        "512 prefill tokens at context 1536, by those at 0": {"time": last.seconds / first.seconds},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--title", default="MODEL", help="how the page names the checkpoint")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    add_write_flag(parser, RESULT)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    load, lines, stages = os.getloadavg()[0], [], {}
    for threads in options.threads:
        use_threads(threads)
        found = limits(dtype)
        stages[threads] = [
            *encoding(options.model, dtype, found, options.rounds),
            *decoding(options.model, dtype, found, options.rounds),
        ]
        lines += section(threads, found, stages[threads])
    head = [
        "# Stages beside their limits",
        "",
        f"`python -m benchmarks stages {options.title} --dtype {options.dtype}`, {options.rounds} rounds, "
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit()}, {chip()}, torch {torch.__version__}; load "
        f"average {load:.1f} before, {os.getloadavg()[0]:.1f} at the end.",
        "",
        "In process: no queue, no other worker. `least` is what the bytes that must be read or copied, or",
        "the operations of linear layers and attention, take at the limit.",
        "",
    ]
    publish("\n".join([*head, *lines]), RESULT, write=options.write)
    if options.write:
        for name, figures in reached(stages).items():
            record(name, figures, RESULT)


if __name__ == "__main__":
    main()

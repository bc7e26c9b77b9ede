"""Triptych and vLLM on the same cores, in turns: the same requests, ratios round by round.

    python -m benchmarks against_peer PEER --model small --results DIR [--only 'text*@16'] [--rounds 3]
    python -m benchmarks against_peer --results DIR --write

PEER is a folder with models/tiny and models/small, a virtual environment venv/ that has vLLM's CPU build, and
epd_proxy.py, which joins vLLM's encoder and PD instances. Every run appends to DIR; without PEER the page is
made of it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.against_peer.loads import LOADS, WORKLOADS
from benchmarks.against_peer.page import page, reached
from benchmarks.against_peer.rounds import measure_turns, run_turns, turns_parser
from benchmarks.against_peer.systems import matrix_of, systems_of
from benchmarks.result_page import RESULTS, add_write_flag
from triptych.goodput.report.display import Display

RESULT = RESULTS / "against_peer.md"


def parser() -> argparse.ArgumentParser:
    found = turns_parser(
        __doc__, model="small", systems="vllm,triptych", more_systems="vllm-epd, colocated, before"
    )
    found.add_argument("--before", type=Path, help="a checkout of Triptych to measure as `before`")
    add_write_flag(found, RESULT)
    return found


def main(arguments: list[str] | None = None) -> int:
    return run_turns(parser().parse_args(arguments), measure, page, reached, RESULT)


def measure(options: argparse.Namespace, display: Display) -> bool:
    matrix = matrix_of(options.model, options.peer.resolve())
    return measure_turns(options, display, matrix, systems_of(matrix, options.before), LOADS, WORKLOADS)


if __name__ == "__main__":
    raise SystemExit(main())

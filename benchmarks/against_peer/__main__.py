"""Triptych and vLLM on the same cores, in turns: the same requests, ratios round by round.

    python -m benchmarks against_peer PEER --model small --results DIR [--only 'text*@16'] [--rounds 3]
    python -m benchmarks against_peer --results DIR --write

PEER is a folder with models/tiny and models/small, a virtual environment venv/ that has vLLM's CPU build, and
epd_proxy.py, which joins vLLM's encoder and PD instances. Every run appends to DIR; without PEER the page is
made of it.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.against_peer.arguments import rounds_of, turns_parser
from benchmarks.against_peer.figures import quiet
from benchmarks.against_peer.loads import LOADS, WORKLOADS, chosen
from benchmarks.against_peer.page import page, reached
from benchmarks.against_peer.rounds import Rounds, read_turns
from benchmarks.against_peer.systems import matrix_of, systems_of
from benchmarks.result_page import RESULTS, add_write_flag, publish
from benchmarks.targets import record
from triptych.errors import ConfigError
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
    """0 when everything that was asked for was measured, 1 when not, 2 for bad input."""
    options = parser().parse_args(arguments)
    # Servers end with this process, by SIGTERM too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    display = Display(Console(soft_wrap=True))
    try:
        done = options.peer is None or measure(options, display)
        turns = read_turns(options.results)
        if options.peer is None:
            publish(page(turns), RESULT, write=options.write)
            if options.write:
                ours = [turn for turn in quiet(turns) if turn.system == "triptych"]
                commits = ", ".join(sorted({turn.commit for turn in ours}))
                for name, figures in reached(turns).items():
                    record(name, figures, RESULT, made_at=commits, date=max(turn.date for turn in ours)[:10])
    except ConfigError as error:
        display.warn(str(error))
        return 2
    return 0 if done else 1


def measure(options: argparse.Namespace, display: Display) -> bool:
    matrix = matrix_of(options.model, options.peer.resolve())
    known = systems_of(matrix, options.before)
    names = options.systems.split(",")
    for name in names:
        if name not in known:
            hint = " (give --before)" if name == "before" else ""
            raise ConfigError(f"--systems {name!r} is not known{hint}: use some of {', '.join(known)}")
    systems = [known[name] for name in names]
    return Rounds(matrix, systems, WORKLOADS, options.results, rounds_of(options), display).run(
        chosen(options.only, LOADS)
    )


if __name__ == "__main__":
    raise SystemExit(main())

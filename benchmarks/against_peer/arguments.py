"""The command line of a benchmark in turns, as far as all of them have it."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.against_peer.rounds import Options
from benchmarks.against_peer.systems import MODELS


def turns_parser(doc: str | None, *, model: str, systems: str, more_systems: str) -> argparse.ArgumentParser:
    """A parser with the default `model` and `systems`; `more_systems` names others in its help."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("peer", type=Path, nargs="?", help="folder of the peer kit; none: only the page")
    found.add_argument("--model", choices=MODELS, default=model)
    found.add_argument("--results", type=Path, required=True, help="folder of the turns")
    found.add_argument("--only", action="append", default=[], help="pattern of loads; again for more")
    found.add_argument("--systems", default=systems, help=f"names: {more_systems} too")
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument("--first", type=int, default=0, help="number of the first round")
    found.add_argument("--waves", type=int, default=2, help="measured requests by concurrency")
    found.add_argument("--minutes", type=float, default=0.0, help="begin no round after these")
    found.add_argument(
        "--lock", type=Path, help="file to hold an exclusive lock on while a round is measured"
    )
    return found


def rounds_of(options: argparse.Namespace) -> Options:
    """The rounds that a command line asks for."""
    return Options(options.rounds, options.first, options.waves, options.minutes, options.lock)

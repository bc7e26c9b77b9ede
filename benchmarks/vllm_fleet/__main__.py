"""Our encoders, store and proxy in front of vLLM servers, against vLLM alone: in turns, on the same cores.

    python -m benchmarks vllm_fleet PEER --packages PACKAGES --results DIR [--systems NAMES]
    python -m benchmarks vllm_fleet --results DIR --write

PEER is the kit that `against_peer` takes: models/, a virtual environment venv/ with vLLM's CPU build, and
epd_proxy.py. PACKAGES has what our connector needs beside vLLM, made by `pip install --target PACKAGES redis
hiredis msgpack xxhash`. Every run appends to DIR: what a run has no time for, the next one measures with
--first. Without PEER the page is made of DIR, with DIR/notes.md on it, should that be there.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.against_peer.arguments import rounds_of, turns_parser
from benchmarks.against_peer.figures import quiet
from benchmarks.against_peer.loads import chosen
from benchmarks.against_peer.rounds import Rounds, read_turns
from benchmarks.against_peer.systems import matrix_of
from benchmarks.result_page import RESULTS, add_write_flag, publish
from benchmarks.targets import record
from benchmarks.vllm_fleet.loads import LOADS, WORKLOADS
from benchmarks.vllm_fleet.page import page, reached
from benchmarks.vllm_fleet.systems import Parts, namespace_of, systems_of
from triptych.errors import ConfigError
from triptych.goodput.report.display import Display

RESULT = RESULTS / "vllm_fleet.md"
_VERSIONS = "versions.json"
#: Prints the versions of what vLLM runs on.
_ASK_VERSIONS = """
import json, platform
from importlib.metadata import version
found = {name: version(name) for name in ("vllm", "torch", "transformers")}
print(json.dumps({"python": platform.python_version(), **found}))
"""


def parser() -> argparse.ArgumentParser:
    found = turns_parser(
        __doc__, model="tiny", systems="triptych,vllm-epd,vllm", more_systems="replicas-triptych, …"
    )
    found.add_argument(
        "--packages", type=Path, help="folder with redis, hiredis, msgpack and xxhash for vLLM"
    )
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
        if options.peer is None:
            _publish(options)
    except ConfigError as error:
        display.warn(str(error))
        return 2
    return 0 if done else 1


def measure(options: argparse.Namespace, display: Display) -> bool:
    if options.packages is None or not (options.packages / "redis").is_dir():
        raise ConfigError(
            f"--packages {options.packages}: give the folder in which vLLM finds redis, made by "
            "pip install --target FOLDER redis hiredis msgpack xxhash"
        )
    peer = options.peer.resolve()
    matrix = matrix_of(options.model, peer)
    known = systems_of(matrix, Parts(matrix, options.packages.resolve(), namespace_of(matrix)))
    names = options.systems.split(",")
    for name in names:
        if name not in known:
            raise ConfigError(f"--systems {name!r} is not known: use some of {', '.join(known)}")
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / _VERSIONS).write_text(json.dumps(_versions(peer)))
    systems = [known[name] for name in names]
    return Rounds(matrix, systems, WORKLOADS, options.results, rounds_of(options), display).run(
        chosen(options.only, LOADS)
    )


def _versions(peer: Path) -> dict[str, str]:
    command = [str(peer / "venv" / "bin" / "python"), "-c", _ASK_VERSIONS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise ConfigError(f"{peer}/venv has no vLLM: {done.stderr.strip()[-300:]}")
    return dict(json.loads(done.stdout))


def _publish(options: argparse.Namespace) -> None:
    turns = read_turns(options.results)
    versions, notes = options.results / _VERSIONS, options.results / "notes.md"
    text = page(
        turns,
        json.loads(versions.read_text()) if versions.exists() else {},
        notes.read_text() if notes.exists() else "",
    )
    publish(text, RESULT, write=options.write)
    if options.write:
        ours = [turn for turn in quiet(turns) if turn.commit]
        commits = ", ".join(sorted({turn.commit for turn in ours}))
        for name, figures in reached(turns).items():
            record(name, figures, RESULT, made_at=commits, date=max(turn.date for turn in ours)[:10])


if __name__ == "__main__":
    raise SystemExit(main())

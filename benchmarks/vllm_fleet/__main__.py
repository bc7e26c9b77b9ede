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
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.against_peer.loads import Turn
from benchmarks.against_peer.rounds import measure_turns, run_turns, turns_parser
from benchmarks.against_peer.systems import matrix_of
from benchmarks.result_page import RESULTS, add_write_flag
from benchmarks.vllm_fleet.page import LOADS, WORKLOADS, page, reached
from benchmarks.vllm_fleet.systems import Parts, namespace_of, systems_of
from triptych.base.errors import ConfigError
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
    options = parser().parse_args(arguments)
    return run_turns(options, measure, partial(_page, options.results), reached, RESULT)


def measure(options: argparse.Namespace, display: Display) -> bool:
    if options.packages is None or not (options.packages / "redis").is_dir():
        raise ConfigError(
            f"--packages {options.packages}: give the folder in which vLLM finds redis, made by "
            "pip install --target FOLDER redis hiredis msgpack xxhash"
        )
    peer = options.peer.resolve()
    matrix = matrix_of(options.model, peer)
    known = systems_of(matrix, Parts(matrix, options.packages.resolve(), namespace_of(matrix)))
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / _VERSIONS).write_text(json.dumps(_versions(peer)))
    return measure_turns(options, display, matrix, known, LOADS, WORKLOADS)


def _versions(peer: Path) -> dict[str, str]:
    command = [str(peer / "venv" / "bin" / "python"), "-c", _ASK_VERSIONS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise ConfigError(f"{peer}/venv has no vLLM: {done.stderr.strip()[-300:]}")
    return dict(json.loads(done.stdout))


def _page(results: Path, turns: Sequence[Turn]) -> str:
    versions, notes = results / _VERSIONS, results / "notes.md"
    known = json.loads(versions.read_text()) if versions.exists() else {}
    return page(turns, known, notes.read_text() if notes.exists() else "")


if __name__ == "__main__":
    raise SystemExit(main())

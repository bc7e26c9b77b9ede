"""Everything that is to be known of a GPU: checks and `tests/gpu`, engines, towers, and what is deployed.

    python -m benchmarks gpu [checks] [engines] [towers] [deployed] [--minutes 8] [--page FILE]
    python -m benchmarks gpu --rehearse --page FILE                     # small, without a GPU

Each part is a process with a deadline, after which the page has what was measured until then. The page keeps
the sections of the parts that are not run. Needs what `tests/gpu/requirements.txt` lists, and no checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.find_torch import missing_torch
from benchmarks.gpu.part_page import PartPage, put, section
from benchmarks.result_page import RESULTS
from triptych_bench.goodput.report.machine import commit

RESULT = RESULTS / "gpu.md"
_ROOT = Path(__file__).resolve().parents[2]
#: The module of each part, in the order in which they run.
_PARTS = {"checks": "first_checks", "engines": "engines", "towers": "towers", "deployed": "deployed"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*_PARTS, []], help="all by default")
    parser.add_argument("--minutes", type=float, default=8.0, help="deadline of each part")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with small sizes")
    parser.add_argument("--page", type=Path, default=RESULT)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if missing := missing_torch(cuda=not options.rehearse):
        sys.stderr.write(f"make gpu: {missing}\n")
        return 2
    if options.file is not None:
        return _run_here(options.parts[0], options.file, small=options.rehearse)
    codes = [_run(name, options) for name in options.parts or _PARTS]
    return max(codes)


def _run_here(name: str, file: Path, *, small: bool) -> int:
    page = PartPage(file)
    module = import_module(f"benchmarks.gpu.{_PARTS[name]}")
    module.run(page, "cpu" if small else "cuda", small=small)
    return min(page.failures, 1)


def _run(name: str, options: argparse.Namespace) -> int:
    """Runs a part in a process of its own, and puts what it wrote into the page; 0 if nothing failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "part.md"
        file.touch()
        command = [sys.executable, "-m", "benchmarks.gpu", name, f"--file={file}"]
        command += ["--rehearse"] if options.rehearse else []
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            command, cwd=_ROOT, env=os.environ | {"PYTHONPATH": path}, start_new_session=True
        )
        ended = ""
        try:
            code = process.wait(options.minutes * 60)
        except subprocess.TimeoutExpired:
            code, ended = 1, f"Cut off after {options.minutes:g} minutes"
        finally:
            _kill(process)
        if not ended and (code < 0 or (code and not file.read_text("utf-8"))):
            ended = f"Ended with {code}"
        number = list(_PARTS).index(name) + 1
        how = f"`python -m benchmarks gpu {name}{' --rehearse' if options.rehearse else ''}`, "
        how += f"{datetime.now(UTC):%Y-%m-%d}, commit {commit()[:12]}."
        put(options.page, f"{number}. {name}", how + "\n\n" + section(file.read_text("utf-8"), ended))
    return abs(code)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The process and what it has started, all of one session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    sys.exit(main())

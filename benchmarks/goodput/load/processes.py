"""Runs the load generator's process for one window."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from triptych.base.errors import TriptychError
from triptych.goodput.load.job import LoadJob, Progress, WindowReport

#: Seconds beyond the last planned send and its timeout: drawing pictures, starting, ending.
_SLACK = 600.0


class LoadError(TriptychError):
    """The load generator ended without a report."""


def run_window(job: LoadJob, on_progress: Callable[[Progress], None] = lambda progress: None) -> WindowReport:
    """Sends the job's load from a process of its own. LoadError when that ends without a report."""
    last = max((planned for planned, _ in job.schedule), default=0.0)
    waves = len(job.schedule) / job.concurrency if job.concurrency else 1.0
    deadline = last + job.timeout * max(waves, 1.0) + _SLACK
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as folder:
        path = Path(folder) / "report"
        command = [sys.executable, "-m", "triptych.goodput.load.generator", str(path)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            timer = threading.Timer(deadline, process.kill)
            timer.start()
            try:
                errors = _converse(process, msgspec.msgpack.encode(job), on_progress)
            finally:
                timer.cancel()
                if process.poll() is None:
                    process.kill()
        if process.returncode or not path.exists():
            raise LoadError(f"the load generator ended with {process.returncode}: {errors.strip()[-2000:]}")
        return msgspec.msgpack.decode(path.read_bytes(), type=WindowReport)


def _converse(process: subprocess.Popen[bytes], job: bytes, on_progress: Callable[[Progress], None]) -> str:
    """Gives the job, hands on every line of progress, waits for the end; what it wrote as errors."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(process.stderr.read()))  # type: ignore[union-attr]
    reader.start()
    # A generator that could not start gives its reason by exit code and standard error.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(job)
        process.stdin.close()
    for line in process.stdout:
        on_progress(msgspec.json.decode(line, type=Progress))
    process.wait()
    reader.join()
    return b"".join(found).decode(errors="replace")

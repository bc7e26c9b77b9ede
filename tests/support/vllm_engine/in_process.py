"""A PD worker with vLLM in its own process: `triptych pd --engine vllm` in vLLM's environment."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from support.fakes.fake_workers import TOKEN
from support.processes.cluster import wait_for
from support.vllm_engine.server import HOME, vllm_environment
from triptych.launch.parent import supervised

#: Seconds until the worker is ready; most of them are imports in three processes.
START_SECONDS = 400.0
_END_SECONDS = 60.0
_FLAGS = (
    *("--engine", "vllm", "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "16"),
    *("--engine-args", '{"enforce_eager": true}'),
)


class InProcessWorker:
    """The worker's process. It may end and be started again."""

    def __init__(self, model: Path, store_url: str, log: Path, words: Sequence[str] = ()) -> None:
        self.log = log
        python = str(HOME / "venv" / "bin" / "python")
        self._command = [
            *(python, "-m", "triptych.cli", "pd", str(model), "--store", store_url, *_FLAGS, *words)
        ]
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process; `wait_ready` waits for it."""
        command, environment = supervised(self._command)
        environment |= vllm_environment() | {"TRIPTYCH_INTERNAL_TOKEN": TOKEN}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
            )
        self._starts += 1

    def wait_ready(self) -> None:
        wait_for("the worker to be ready", self._is_ready, START_SECONDS)

    def _is_ready(self) -> bool:
        text = self.log.read_text()
        assert self.ended is None, text[-4000:]
        return text.count("ready: pd ") >= self._starts

    @property
    def ended(self) -> int | None:
        """The exit status; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def wait_ended(self) -> int:
        assert self._process is not None
        return self._process.wait(_END_SECONDS)

    def engine_processes(self) -> list[int]:
        """The process ids of vLLM's engine and its workers, the engine's first."""
        assert self._process is not None
        engines = [pid for pid in children(self._process.pid) if "EngineCore" in command_line(pid)]
        return [*engines, *(child for pid in engines for child in children(pid))]

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to what has not ended in time."""
        if self._process is None or self.ended is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def children(pid: int) -> list[int]:
    """The processes that `pid` has started, whichever of its threads did."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, file.read_text().split())
    return found


def command_line(pid: int) -> str:
    """What the process calls itself; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""

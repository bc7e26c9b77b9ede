"""A Deployment of real encoder worker processes, started by the command line and ended by SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


class ProcessFleet:
    """A ScaleTarget. `log` is what all of them wrote."""

    def __init__(self, model: Path, store_url: str, token: str, log: Path) -> None:
        self._command = [sys.executable, "-m", "triptych.cli", "encoder", str(model), "--store", store_url]
        self._environment = os.environ | {"TRIPTYCH_INTERNAL_TOKEN": token}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended: list[subprocess.Popen[bytes]] = []
        self.log = log
        #: Replicas that were asked for, one after another.
        self.steps: list[int] = []

    @property
    def replicas(self) -> int:
        return len(self._processes)

    def scale(self, replicas: int) -> None:
        self.steps.append(replicas)
        while len(self._processes) < replicas:
            with self.log.open("ab") as log:
                self._processes.append(
                    subprocess.Popen(
                        [*self._command, "--threads", "1", "--prepared-memory", "64MiB"],
                        stdout=log,
                        stderr=log,
                        stdin=subprocess.DEVNULL,
                        env=self._environment,
                    )
                )
        while len(self._processes) > replicas:
            process = self._processes.pop()
            process.send_signal(signal.SIGTERM)
            self._ended.append(process)

    def codes(self) -> list[int]:
        """Exit codes of all that were ended; waits for them."""
        return [process.wait(60) for process in self._ended]

    def close(self) -> None:
        for process in (*self._processes, *self._ended):
            if process.poll() is None:
                process.kill()
                process.wait()

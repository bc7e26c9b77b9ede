"""A cluster of processes with two API keys, of this source tree or of another one."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fairness.flood import MODEL
from benchmarks.fairness.sends import Door
from triptych.base.parent import supervised
from triptych.proxy.auth.keys import new_key
from triptych_bench.goodput.launch import free_ports

A, B = "alice", "bob"
HERE = Path(__file__).parents[2]
_START_SECONDS, _END_SECONDS = 180.0, 10.0


@dataclass(frozen=True)
class TwoKeys:
    """A running cluster and its keys by name."""

    door: Door
    keys: dict[str, str]
    key_file: Path
    log: Path
    run_folder: Path

    def add_keys(self, count: int) -> None:
        """So many further keys, which nobody has; the proxy reads them within a second or two."""
        lines = (f"spare{number} sha256:{secrets.token_hex(32)}\n" for number in range(count))
        with self.key_file.open("a") as file:
            file.write("".join(lines))

    def pids(self) -> dict[str, int]:
        """The processes that live now, by name."""
        state = json.loads((self.run_folder / "cluster.json").read_text())
        return {name: int(pid) for name, pid in state["processes"].items() if pid}


@contextlib.contextmanager
def two_keys(tree: Path = HERE, *words: str) -> Iterator[TwoKeys]:
    """`triptych serve` of the source tree, with the demo model, one encoder worker and one PD worker."""
    with tempfile.TemporaryDirectory(prefix="triptych-fairness-") as name:
        folder = Path(name)
        made = {who: new_key(who) for who in (A, B)}
        key_file, log = folder / "keys", folder / "log"
        key_file.write_text("".join(f"{line}\n" for _, line in made.values()))
        port, grpc_port = free_ports(2)
        command = [sys.executable, "-m", "triptych.apps.cli", "serve", "--run-dir", str(folder / "run")]
        command += ["--port", str(port), "--grpc-port", str(grpc_port), "--api-key-file", str(key_file)]
        command += ["--served-model-name", MODEL, "--encoders", "1", "--pd-workers", "1", *words]
        command, environment = supervised(command)
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                cwd=tree,
                env=environment | {"PYTHONPATH": str(tree)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        try:
            _wait(process, log)
            keys = {who: key for who, (key, _) in made.items()}
            yield TwoKeys(Door(port, grpc_port), keys, key_file, log, folder / "run")
        finally:
            _end(process, folder / "run" / "cluster.json")


def _wait(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while b"Triptych answers" not in log.read_bytes():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the cluster did not start:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes], state: Path) -> None:
    """In good order where that is quick; a flooded proxy may not hear a signal."""
    # Before the end: a cluster that ends in good order, however late, takes the file with it.
    pids = json.loads(state.read_text())["processes"].values() if state.exists() else ()
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
        return
    for pid in (*(pid for pid in pids if pid), process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    process.wait()

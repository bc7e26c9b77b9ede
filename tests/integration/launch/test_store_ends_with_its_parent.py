"""A supervisor that is killed leaves no store behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_SUPERVISOR = """
import sys, time
from pathlib import Path
from triptych.launch.embedded_store import EmbeddedStore

store = EmbeddedStore(Path(sys.argv[1]), 32 << 20)
store.start()
print(store.pid, flush=True)
time.sleep(600)
"""
PATIENCE = 60.0


def _lives(pid: int) -> bool:
    """Whether it runs; a dead process that nobody has reaped yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_the_embedded_store_ends_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", _SUPERVISOR, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        assert _lives(pid)
        supervisor.kill()
    deadline = time.monotonic() + PATIENCE
    while _lives(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        assert not _lives(pid)
        assert not (tmp_path / "store.sock").exists()
    finally:
        if _lives(pid):
            os.kill(pid, signal.SIGKILL)

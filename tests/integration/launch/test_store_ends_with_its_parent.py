"""A supervisor that is killed leaves no store behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from support.processes.processes import lives, survivors

_SUPERVISOR = """
import sys, time
from pathlib import Path
from triptych.apps.launch.embedded_store import EmbeddedStore

store = EmbeddedStore(Path(sys.argv[1]), 32 << 20)
store.start()
print(store.pid, flush=True)
time.sleep(600)
"""


def test_the_embedded_store_ends_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", _SUPERVISOR, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        assert lives(pid)
        supervisor.kill()
    left = survivors([pid])
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
    assert not (tmp_path / "store.sock").exists()

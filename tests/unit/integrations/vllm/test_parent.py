"""An engine's process ends with the one that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from support.processes.cluster import wait_for

_PARENT = """
import multiprocessing, time
from triptych.integrations.vllm.engine import end_with_parent

def engine():
    end_with_parent()
    time.sleep(60)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=engine)
    child.start()
    print(child.pid, flush=True)
    child.join()
"""


def test_the_child_of_a_killed_process_ends(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(20)
    wait_for("the child to end", lambda: not runs(child))


def runs(pid: int) -> bool:
    """Whether the process is there; a zombie does not run."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False

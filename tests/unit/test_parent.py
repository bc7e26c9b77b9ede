"""Process lifetimes: SIGTERM in a container's first process."""

from __future__ import annotations

import signal
import subprocess
import sys

#: A program whose SIGTERM is ignored, as Linux ignores it for a container's first process without a handler.
FIRST_PROCESS = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
from triptych.base.parent import end_on_sigterm
end_on_sigterm({process})
print("ready", flush=True)
time.sleep({seconds})
"""


def exit_code(process: int, seconds: float) -> int:
    """How the program ends that is sent SIGTERM."""
    program = FIRST_PROCESS.format(process=process, seconds=seconds)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None and running.stdout.readline() == "ready\n"
        running.send_signal(signal.SIGTERM)
        return running.wait(timeout=30)


def test_sigterm_ends_a_first_process_that_still_starts() -> None:
    assert exit_code(process=1, seconds=60) == 128 + signal.SIGTERM


def test_another_process_keeps_what_it_had_for_sigterm() -> None:
    assert exit_code(process=2, seconds=0.2) == 0

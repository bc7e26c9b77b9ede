"""What every service does before it serves."""

from __future__ import annotations

import signal
import subprocess
import sys

_BROKEN = """
import os, signal
from triptych.apps.cli.commands.services import _start
from triptych.base.config import ProxyConfig
_start("proxy", ProxyConfig())
os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_a_service_that_a_library_breaks_tells_in_which_call():
    done = subprocess.run([sys.executable, "-c", _BROKEN], capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr
    assert 'File "<string>", line 6' in done.stderr

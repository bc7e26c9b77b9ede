"""The scheduler and all that it uses can be imported without torch and gRPC."""

from __future__ import annotations

import subprocess
import sys


def test_the_core_loads_neither_torch_nor_grpc() -> None:
    code = "import sys, triptych.pd_worker.core.scheduler; sys.exit(len({'torch', 'grpc'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

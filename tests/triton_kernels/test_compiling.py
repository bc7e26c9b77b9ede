"""Every kind of attention compiles to machine code for GPUs, by the compiler that Triton brings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILING = Path(__file__).with_name("compiling.py")
#: Shared memory of a program on smaller GPUs of that code: an L4 (8.9).
_SHARED = 99 * 1024


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [80, 90])
def test_every_kind_compiles_and_fits_the_shared_memory(capability: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(COMPILING), str(capability)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(lines) == 21
    for case, shared, code in lines:
        assert code > 1000 and shared <= _SHARED, case

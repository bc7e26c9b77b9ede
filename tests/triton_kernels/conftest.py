"""These tests need Triton, which a CPU's torch does not bring: `make test-slow` runs them beside it."""

from __future__ import annotations

import os
from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]
if find_spec("triton"):
    # Read when a kernel is defined: kernels then run on a CPU, in float32.
    os.environ["TRITON_INTERPRET"] = "1"

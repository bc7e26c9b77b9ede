"""A worker with --engine vllm and no server to be put before says so at once."""

from __future__ import annotations

import subprocess
import sys

from support.data.checkpoints import build_checkpoint
from support.stores.server import StoreServer


def test_the_worker_ends_with_the_remedy(tmp_path):
    store = StoreServer(tmp_path / "store")
    store.start()
    try:
        words = ("pd", str(build_checkpoint("qwen3_vl")), "--engine", "vllm", "--dtype", "float32")
        command = [sys.executable, "-m", "triptych.apps.cli", *words, "--store", store.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    finally:
        store.kill()
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "--engine vllm needs --engine-url" in last
    assert "vllm serve" in last and "Traceback" not in done.stderr

"""The part of `make gpu` that measures what is deployed, rehearsed on a CPU with vLLM in it."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from support.vllm_engine.server import HOME, ROOT, vllm_environment

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(590)]


def test_both_systems_are_measured_at_every_rate(checkpoint, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    for name, value in vllm_environment().items():
        # The part brings our connector and its packages itself; a library for OpenMP is vLLM's own.
        if name not in ("PYTHONPATH", "LD_PRELOAD"):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{HOME / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}")
    from benchmarks.gpu.__main__ import main

    page = Path(tmp_path / "gpu.md")
    assert main(["deployed", "--rehearse", "--page", str(page)]) == 0, page.read_text()
    text = page.read_text()
    rows = re.findall(r"^\| (Triptych before vLLM|vLLM alone) \| 1 \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    assert [(name, failed) for name, _, failed in rows] == [
        ("Triptych before vLLM", "0"),
        ("vLLM alone", "0"),
    ]
    assert "tower" in text

"""The runner against two null servers: cells measured, skipped, failed, tried again; their report."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.baselines.__main__ import main
from benchmarks.baselines.report import main as report
from support import null_server

NULL = 'commands = [["{python}", "{server}", "--port", "${{PORT}}", {words}]]'
MATRIX = """
name = "fake"
model = "none"
repeats = 1
[loads]
mix = "ttft:20000"
[rates]
mix = 40.0
[roles]
ours = "quick"
colocated = "slow"
other = "slow"
[fixed]
requests = 8
warm_up = 0.1
[[system]]
name = "quick"
ports = ["PORT"]
url = "http://127.0.0.1:${PORT}"
ready = ["/v1/models"]
timeout = 30
QUICK
[[system]]
name = "slow"
ports = ["PORT"]
url = "http://127.0.0.1:${PORT}"
ready = ["/v1/models"]
timeout = 30
SLOW
[[cells]]
kind = "fixed"
loads = ["mix"]
systems = ["quick", "slow"]
"""


def write(path: Path, slow_words: str) -> None:
    quick = NULL.format(
        python=sys.executable, server=null_server.__file__, words='"--ttft", "0.001", "--tpot", "0.0001"'
    )
    slow = NULL.format(python=sys.executable, server=null_server.__file__, words=slow_words)
    path.write_text(MATRIX.replace("QUICK", quick).replace("SLOW", slow))


def cells(folder: Path) -> dict[str, dict]:
    return {path.name: json.loads(path.read_text()) for path in folder.glob("fake.fixed.*.json")}


@pytest.fixture(autouse=True)
def quick_settling(monkeypatch):
    monkeypatch.setattr("benchmarks.baselines.measure._SETTLE_REQUESTS", 1)
    monkeypatch.setattr("benchmarks.baselines.runner.IDLE_SECONDS", 0.1)


def test_a_run_goes_on_where_it_was_cut_off_and_tells_what_failed(tmp_path, capsys):
    matrix, folder, lock = tmp_path / "fake.toml", tmp_path / "cells", tmp_path / "turn"
    write(matrix, '"--fail-every", "1"')
    words = [str(matrix), "--results", str(folder)]
    assert main([*words, "--lock", str(lock)]) == 1
    found = cells(folder)
    assert {name: cell["status"] for name, cell in found.items()} == {
        "fake.fixed.mix.quick.0.json": "done",
        "fake.fixed.mix.slow.0.json": "failed",
    }
    failed = found["fake.fixed.mix.slow.0.json"]
    assert "HTTP 503" in failed["why"] and "http://127.0.0.1" in failed["why"]
    done = found["fake.fixed.mix.quick.0.json"]
    assert (done["rate"], done["windows"][0]["completed"], done["attempt"]) == (40.0, 8, 1)
    assert done["cpu_shares"] and done["memory_mb"] > 1
    assert lock.exists() and not lock.with_name("turn.want").exists()
    capsys.readouterr()

    write(matrix, '"--ttft", "0.001"')
    assert main([*words, "--retry-failed", "--minutes", "0.001"]) == 1
    assert "no time left for it" in capsys.readouterr().out
    assert main([*words, "--retry-failed"]) == 0
    told = capsys.readouterr().out
    assert "1 of 2 cells are there already" in told and "2 of 2 cells, about 0 s left" in told
    again = cells(folder)
    assert again["fake.fixed.mix.quick.0.json"] == done
    slow = again["fake.fixed.mix.slow.0.json"]
    assert (slow["status"], slow["attempt"]) == ("done", 2)
    assert all(not os.path.exists(f"/proc/{pid}") for pid in slow["server"]["pids"])

    matrix.write_text(matrix.read_text().replace("ttft:20000", "ttft:10"))
    assert main(words) == 2
    assert "was measured with other settings" in capsys.readouterr().out

    assert report([str(folder)]) == 0
    text = capsys.readouterr().out
    assert "- 2 of 2 cells are measured." in text
    assert "quick / slow" in text

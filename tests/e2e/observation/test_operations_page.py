"""The commands of docs/operations.md as one script, with real processes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from support.data.checkpoints import build_checkpoint
from support.data.traffic import picture
from support.processes.cluster import PATIENCE, wait_for
from support.tools import tool
from triptych.apps.cli.app import app

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PAGE = Path(__file__).parents[3] / "docs" / "operations.md"
#: Hosts of the page, 10.0.0.N, are addresses of this machine's loopback network, 127.9.0.N.
HOSTS = (re.compile(r"\b10\.0\.0\.(\d+)\b"), r"127.9.0.\1")


def blocks(words: str) -> list[str]:
    """The page's fenced blocks that are marked with exactly these words."""
    return re.findall(rf"^```{words}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """A Redis at the page's address of the store."""
    host = HOSTS[0].sub(HOSTS[1], "10.0.0.5")
    words = ("--port", "6379", "--bind", host, "--save", "", "--maxmemory", "256mb")
    server = subprocess.Popen(
        [tool("redis-server"), *words, "--maxmemory-policy", "volatile-lru", "--protected-mode", "no"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_for("the store", lambda: _listens(host) or server.poll())
        yield host
    finally:
        server.terminate()
        server.wait(PATIENCE)


def _listens(host: str) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, 6379), PATIENCE):
        return True
    return False


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Two versions of one model: checkpoints that differ in their weights."""
    first, second = (build_checkpoint("qwen3_vl", tmp_path / "models" / f"qwen3-vl-{n}") for n in (1, 2))
    weights = load_file(first / "model.safetensors")
    save_file({name: 1.01 * tensor for name, tensor in weights.items()}, second / "model.safetensors")
    return tmp_path / "models"


def script(models: Path) -> str:
    """All blocks as one shell script, which names each before it runs and ends with what it has started."""
    parts = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT"]
    for number, block in enumerate(blocks("sh"), 1):
        parts += [f"echo '== block {number}' >&2", HOSTS[0].sub(HOSTS[1], block)]
    return "\n".join(parts).replace("/models/", f"{models}/")


def test_every_command_of_the_page_works_in_its_order(tmp_path: Path, store: str, models: Path) -> None:
    picture(1, 64, 64).save(tmp_path / "picture.png")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    command = bin_folder / "triptych"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m triptych.apps.cli "$@"\n')
    command.chmod(0o755)
    log = tmp_path / "log"
    with log.open("w") as out:
        done = subprocess.run(
            [shutil.which("bash") or "bash", "-c", script(models)],
            cwd=tmp_path,
            env={**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=800,
        )
    text = log.read_text()
    assert done.returncode == 0, text[-6000:]
    assert f"== block {len(blocks('sh'))}" in text


def test_every_command_of_the_page_is_in_a_block_that_is_run() -> None:
    """A command in the running text or in another kind of block would go stale unseen."""
    run = "\n".join(blocks("sh"))
    named = set(re.findall(r"\btriptych ([a-z]+)\b", PAGE.read_text()))
    known = {name for name in named if name in app.commands}
    assert {name for name in known if f"triptych {name}" not in run} <= {"serve"}

"""A vLLM of the worker's own, played by a program that listens: started, started again, ended."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import sys
from ast import literal_eval
from pathlib import Path

import pytest

from support.data.checkpoints import build_checkpoint
from support.waiting import until
from triptych.base.config import GIB, PDConfig
from triptych.base.errors import ConfigError
from triptych.integrations.vllm.options import parse_options
from triptych.models.identity import model_identity
from triptych.pd_worker.vllm import own_server
from triptych.pd_worker.vllm.own_server import OwnServer, server_args, with_dtype

STORE = "redis://user:secret@127.0.0.1:6379/0"
#: Writes its process id and arguments to a log, then runs the test's own lines.
PROGRAM = """#!{python}
import os, socket, sys, time
with open({log!r}, "a") as log:
    log.write(repr([os.getpid(), *sys.argv[1:]]) + "\\n")
port = int(sys.argv[sys.argv.index("--port") + 1])
{body}
"""
LISTENS = 'server = socket.create_server(("127.0.0.1", port)); time.sleep(600)'


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return build_checkpoint("qwen3_vl")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_server, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(own_server, "_LOOK_SECONDS", 0.05)


class Program:
    """The command, and what it has been started with so far."""

    def __init__(self, folder: Path, body: str) -> None:
        self.path, self._log = folder / "vllm", folder / "log"
        self._log.touch()
        self.path.write_text(PROGRAM.format(python=sys.executable, log=str(self._log), body=body))
        self.path.chmod(0o755)

    @property
    def starts(self) -> list[list[object]]:
        return [literal_eval(line) for line in self._log.read_text().splitlines()]

    @property
    def pids(self) -> list[int]:
        return [int(str(start[0])) for start in self.starts]


def config_of(checkpoint: Path, **flags: object) -> PDConfig:
    return with_dtype(PDConfig(model=str(checkpoint), store=STORE, engine="vllm", **flags))  # type: ignore[arg-type]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_it_listens_on_loopback_and_ends_with_the_context(checkpoint: Path, tmp_path: Path) -> None:
    program, stop = Program(tmp_path, LISTENS), asyncio.Event()
    async with own_server.own_server(config_of(checkpoint), str(program.path), stop) as config:
        await until(lambda: len(program.pids) == 1)
        words = [str(word) for word in program.starts[0][1:]]
        port = words[words.index("--port") + 1]
        assert config.engine_url == f"http://127.0.0.1:{port}"
        assert words[:4] == ["serve", str(checkpoint), "--host", "127.0.0.1"]
        assert "secret" not in " ".join(words)
    assert not alive(program.pids[0])
    assert not stop.is_set()


async def test_one_that_has_served_and_ends_is_started_again(tmp_path: Path) -> None:
    program, stop = Program(tmp_path, LISTENS), asyncio.Event()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = OwnServer([str(program.path), "--port", str(port)], "cpu", port)
    running = asyncio.create_task(server.run(stop))
    try:
        await until(lambda: server.served, "the first server")
        os.kill(program.pids[0], 9)
        await until(lambda: len(program.pids) == 2, "the second server")
        assert not stop.is_set()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert not alive(program.pids[1])


async def test_one_that_ends_before_it_serves_ends_the_worker_with_a_sentence(checkpoint, tmp_path):
    program, stop = Program(tmp_path, "sys.exit(3)"), asyncio.Event()
    with pytest.raises(ConfigError, match="vLLM ended with 3 before it served"):
        async with own_server.own_server(config_of(checkpoint), str(program.path), stop):
            await asyncio.wait_for(stop.wait(), 20.0)
    assert len(program.pids) == 1


def test_the_connector_takes_the_configuration_that_it_is_given(checkpoint: Path, tmp_path: Path) -> None:
    config = config_of(
        checkpoint, max_num_seqs=7, max_model_len=99, device_memory=20 * GIB, kv_memory=GIB, tensor_parallel=2
    )
    file = tmp_path / "store"
    file.write_text(STORE)
    words = server_args(config, 8123, str(file), 80 * GIB)
    transfer = json.loads(words[words.index("--ec-transfer-config") + 1])
    options = parse_options(transfer["ec_connector_extra_config"])
    assert options.store == STORE
    expected = model_identity(checkpoint, dtype=config.dtype, revision="", quantization="none").namespace
    assert options.namespaces == (expected,)
    assert words[words.index("--gpu-memory-utilization") + 1] == "0.250"
    for flag, value in (
        ("--max-num-seqs", "7"),
        ("--max-model-len", "99"),
        ("--kv-cache-memory-bytes", str(GIB)),
        ("--tensor-parallel-size", "2"),
    ):
        assert words[words.index(flag) + 1] == value


def test_the_stores_address_is_for_its_user_alone(checkpoint: Path, tmp_path: Path) -> None:
    async def modes() -> list[int]:
        program = Program(tmp_path, LISTENS)
        async with own_server.own_server(config_of(checkpoint), str(program.path), asyncio.Event()):
            await until(lambda: len(program.pids) == 1)
            words = [str(word) for word in program.starts[0]]
            transfer = json.loads(words[words.index("--ec-transfer-config") + 1])
            file = Path(transfer["ec_connector_extra_config"]["store_file"])
            return [stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(file.parent.stat().st_mode)]

    assert asyncio.run(modes()) == [0o600, 0o700]

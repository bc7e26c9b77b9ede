"""Servers of the baselines: started by commands, paused, ended, told on when they cannot start."""

from __future__ import annotations

import sys
import time
import urllib.request
from pathlib import Path

import pytest

from benchmarks.baselines.matrix import System
from benchmarks.baselines.processes import alive
from benchmarks.baselines.servers import Server, ServerPool
from support import null_server
from triptych.errors import ConfigError

NULL = System(
    name="null",
    commands=((sys.executable, null_server.__file__, "--port", "${PORT}"),),
    url="http://127.0.0.1:${PORT}",
    ready=("/v1/models",),
    ports=("PORT",),
    timeout=30,
    pause=True,
)


def nothing(system: System, server: Server) -> None:
    pass


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for_state(pid: int, wanted: str) -> None:
    """A signal arrives a little after it is sent."""
    deadline = time.monotonic() + 10
    while state(pid) != wanted:
        assert time.monotonic() < deadline, f"{pid} is {state(pid)}, not {wanted}"


def models(server: Server) -> int:
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=10) as reply:
        return reply.status


def test_a_paused_server_goes_on_for_its_next_cell_and_ends_while_paused():
    started: list[str] = []
    pool = ServerPool("none", lambda system, server: started.append(system.name))
    try:
        server = pool.get(NULL)
        assert server.scratch is not None
        (server.scratch / "left").mkdir()
        server.empty_scratch()
        assert not list(server.scratch.iterdir())
        pool.pause(NULL)
        (pid,) = server.pids
        wait_for_state(pid, "T")
        assert server.alive()
        assert models(pool.get(NULL)) == 200
        pool.pause(NULL)
    finally:
        pool.close()
    assert started == ["null"] and not alive(pid) and not server.scratch.exists()


def test_a_server_that_ends_before_it_is_ready_says_what_it_wrote():
    broken = System(
        name="broken", commands=(("sh", "-c", "echo no such luck; exit 3"),), url="http://127.0.0.1:9"
    )
    with pytest.raises(
        ConfigError, match=r"(?s)system 'broken' ended with 3 before it was ready:.*no such luck"
    ):
        ServerPool("none", nothing).get(broken)


def test_a_command_that_is_not_there_is_told():
    missing = System(name="missing", commands=(("/nowhere/serve",),), url="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="cannot start /nowhere/serve: No such file"):
        ServerPool("none", nothing).get(missing)

"""Workers forked from a process with their imports: as good as fresh ones; the fork server may die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from triptych.apps.launch.children import Child
from triptych.apps.launch.fork.client import ForkedProcess, ForkServer
from triptych.base.parent import PARENT_VARIABLE

PATIENCE = 60.0
#: A fork server without torch; its workers do what their first word says.
_SERVER = """
import json, os, socket, sys, time
from pathlib import Path
from triptych.base.parent import die_with_parent
from triptych.apps.launch.fork.server import become, serve_requests

die_with_parent()
{preload}
become(serve_requests(socket.socket(fileno=int(sys.argv[1]))))
die_with_parent()
if sys.argv[1] == "exit":
    sys.exit(int(sys.argv[2]))
told = dict(words=sys.argv[1:], name=os.environ["TRIPTYCH_SERVICE"], session=os.getsid(0), pid=os.getpid())
Path(sys.argv[1]).write_text(json.dumps(told | dict(parent=os.getppid())))
time.sleep(600)
"""
_EXEC = [sys.executable, "-c"]

Start = Callable[..., Awaitable[ForkServer]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    started: list[ForkServer] = []

    async def make(preload: str = "") -> ForkServer:
        server = ForkServer([*_EXEC, _SERVER.format(preload=preload)])
        await server.start()
        started.append(server)
        return server

    yield make
    for server in started:
        await server.end()


async def _fork(server: ForkServer, *words: object) -> ForkedProcess | None:
    own = {"TRIPTYCH_SERVICE": "pd-7", PARENT_VARIABLE: str(os.getpid())}
    return await server.fork("pd-7", [str(word) for word in words], own)


async def _told(path: Path) -> dict[str, object]:
    async with asyncio.timeout(PATIENCE):
        while not path.exists() or not path.read_text():
            await asyncio.sleep(0.01)
    told: dict[str, object] = json.loads(path.read_text())
    return told


async def _end(process: ForkedProcess) -> int:
    process.kill()
    async with asyncio.timeout(PATIENCE):
        return await process.wait()


async def test_a_forked_worker_is_our_child_with_its_own_words_name_and_session(start, tmp_path):
    process = await _fork(await start(), tmp_path / "told", "--flag")
    told = await _told(tmp_path / "told")
    assert told == {
        "words": [str(tmp_path / "told"), "--flag"],
        "name": "pd-7",
        "session": process.pid,
        "pid": process.pid,
        "parent": os.getpid(),
    }
    assert Path(f"/proc/{process.pid}/comm").read_text().strip() == "pd-7"
    assert await _end(process) == -signal.SIGKILL
    assert not Path(f"/proc/{process.pid}").exists()


async def test_the_exit_code_of_a_forked_worker_is_seen(start):
    process = await _fork(await start(), "exit", 2)
    async with asyncio.timeout(PATIENCE):
        assert await process.wait() == 2
    process.send_signal(signal.SIGTERM)
    assert process.returncode == 2


async def test_workers_outlive_the_fork_server_and_the_next_one_must_start_by_exec(start, tmp_path, caplog):
    server = await start()
    process = await _fork(server, tmp_path / "told")
    await _told(tmp_path / "told")
    os.kill(server.pid, signal.SIGKILL)
    assert await _fork(server, tmp_path / "other") is None
    # Noticed by the hang-up, not by waiting: no worker holds the fork server's end.
    assert "by exec from now on" in caplog.text and "TimeoutError" not in caplog.text
    assert server.pid is None
    assert process.returncode is None
    assert await _end(process) == -signal.SIGKILL


@pytest.mark.parametrize(
    "preload",
    [
        "sys.exit(1)",
        "import threading; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        "sys.modules['grpc'] = sys",
    ],
    ids=["it ends", "it has threads", "it has gRPC"],
)
async def test_a_fork_server_that_cannot_fork_safely_forks_nothing(start, preload):
    server = await start(preload)
    assert await _fork(server, "exit", 0) is None
    assert server.pid is None


async def test_the_end_does_not_wait_for_imports(start):
    server = await start("time.sleep(600)")
    waiting = asyncio.create_task(_fork(server, "exit", 0))
    await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE):
        await server.end()
        assert await waiting is None


async def test_a_child_starts_again_by_exec_when_its_fork_server_is_gone(start, tmp_path):
    server = await start()
    write = "import os, sys, time; open(sys.argv[1] + '.exec', 'w').write(str(os.getpid())); time.sleep(600)"
    child = Child("pd-7", [*_EXEC, write, str(tmp_path / "told")], fork_server=server)
    watch = asyncio.create_task(child.watch())
    try:
        forked = await _told(tmp_path / "told")
        async with asyncio.timeout(PATIENCE):
            while child.pid is None:
                await asyncio.sleep(0.01)
        assert forked["pid"] == child.pid
        os.kill(server.pid, signal.SIGKILL)
        os.kill(child.pid, signal.SIGKILL)
        assert await _told(tmp_path / "told.exec")
        assert server.pid is None
    finally:
        await child.end(PATIENCE)
        assert await watch == 0

"""Services that are killed come back where a loop starts them again; the proxy before vLLM's P/D."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from benchmarks.kills import processes
from benchmarks.kills.pd_proxy import PdProxy
from benchmarks.kills.processes import Processes, Service

#: Says that it lives, and so does what it starts.
_PROGRAM = """
import subprocess, sys, time
if len(sys.argv) < 2:
    subprocess.Popen([sys.executable, sys.argv[0], "child"])
print("up", *sys.argv[1:], flush=True)
time.sleep(60)
"""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    monkeypatch.setattr(processes, "PAUSE_SECONDS", 0.05)
    script = tmp_path / "program.py"
    script.write_text(_PROGRAM)
    return Service("one", [sys.executable, str(script)])


@contextlib.asynccontextmanager
async def running(service: Service, folder: Path, *, restarts: bool):
    made = Processes([service], folder, restarts=restarts)
    try:
        await made.start()
        await until(lambda: "up child" in (folder / "one.log").read_text())
        yield made
    finally:
        await made.close()


async def test_a_killed_service_and_what_it_had_started_are_started_again(service, tmp_path):
    log = tmp_path / "one.log"
    async with running(service, tmp_path, restarts=True) as made:
        made.signal("one", signal.SIGKILL)
        await until(lambda: log.read_text().count("up child") == 2)


async def test_without_the_loop_it_stays_away(service, tmp_path):
    async with running(service, tmp_path, restarts=False) as made:
        made.signal("one", signal.SIGKILL)
        # Nothing is left that could start it again.
        await until(lambda: all(task.done() for task in made._tasks))
        assert (tmp_path / "one.log").read_text().count("up child") == 1


async def test_a_stopped_service_ends_with_the_others(service, tmp_path):
    async with running(service, tmp_path, restarts=True) as made:
        made.signal("one", signal.SIGSTOP)


def answering(seen: list[dict[str, Any]], reply: object) -> web.Application:
    async def chat(request: web.Request) -> web.Response:
        seen.append(json.loads(await request.read()))
        return web.json_response(reply)

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", chat)])
    return app


async def test_the_decode_server_is_told_where_the_prefill_server_has_the_kv_cache():
    first: list[dict[str, Any]] = []
    second: list[dict[str, Any]] = []
    where = {"remote_engine_id": "p", "remote_block_ids": [1, 2]}
    async with (
        TestServer(answering(first, {"kv_transfer_params": where})) as prefill,
        TestServer(answering(second, {"answer": 1})) as decode,
    ):
        app, proxy = web.Application(), PdProxy(str(prefill.make_url("")), str(decode.make_url("")))
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]] = proxy.chat
        app.add_routes([web.post("/v1/chat/completions", handler)])
        async with TestClient(TestServer(app)) as client:
            reply = await client.post("/v1/chat/completions", json={"max_tokens": 9, "stream": True})
            assert await reply.json() == {"answer": 1}
    assert (first[0]["max_tokens"], first[0]["stream"]) == (1, False)
    assert first[0]["kv_transfer_params"]["do_remote_decode"] is True
    assert second == [{"max_tokens": 9, "stream": True, "kv_transfer_params": where}]

"""The end of the HTTP server, as connections see it."""

from __future__ import annotations

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from triptych.proxy.http.server import HttpServer
from triptych.proxy.service import bind


async def _refuse(request: Request) -> PlainTextResponse:
    return PlainTextResponse("draining", status_code=503)


async def test_a_connection_that_was_accepted_before_the_end_is_still_answered() -> None:
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = HttpServer(Starlette(routes=[Route("/", _refuse)]), listener)
    task = await server.start()
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while not server.server_state.connections:
            await asyncio.sleep(0.01)
        stopping = asyncio.create_task(server.stop(task))
        await asyncio.sleep(0)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: proxy\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 503")
        writer.close()
        await stopping

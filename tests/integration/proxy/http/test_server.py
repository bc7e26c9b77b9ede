"""The end of the HTTP server, as connections see it."""

from __future__ import annotations

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from triptych.proxy.http.server import HttpServer, bind


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


async def test_a_server_that_leaves_waits_for_kept_connections_but_not_for_ever() -> None:
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = HttpServer(Starlette(routes=[Route("/", _refuse)]), listener)
    task = await server.start()
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: proxy\r\n\r\n")
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert b"connection: close" not in head
        await reader.readexactly(len("draining"))
        # It is idle, and nobody closes it.
        await server.linger(0.2)
        assert server.server_state.connections
        leaving = asyncio.create_task(server.linger(20))
        await asyncio.sleep(0)
        writer.write(b"GET / HTTP/1.1\r\nHost: proxy\r\n\r\n")
        assert b"connection: close" in (await reader.read()).lower()
        await leaving
        assert not server.server_state.connections
        writer.close()
        await server.stop(task)

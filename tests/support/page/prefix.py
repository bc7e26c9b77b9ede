"""A small reverse proxy that serves a server below a path prefix, as a gateway does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Iterator

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route

from support.processes.cluster import PATIENCE, free_port, wait_for

_DROPPED = {"host", "content-length", "transfer-encoding", "connection"}


class _Gateway:
    def __init__(self, url: str) -> None:
        self._url = url

    async def forward(self, request: Request) -> Response:
        headers = {name: value for name, value in request.headers.items() if name not in _DROPPED}
        path = "/" + request.path_params["path"]
        client = httpx2.AsyncClient(base_url=self._url, timeout=PATIENCE)
        sent = client.build_request(request.method, path, headers=headers, content=await request.body())
        reply = await client.send(sent, stream=True)
        kept = {name: value for name, value in reply.headers.items() if name not in _DROPPED}
        return StreamingResponse(_bytes(client, reply), status_code=reply.status_code, headers=kept)


async def _bytes(client: httpx2.AsyncClient, reply: httpx2.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in reply.aiter_raw():
            yield chunk
    finally:
        await reply.aclose()
        await client.aclose()


@contextlib.contextmanager
def behind_prefix(url: str, prefix: str) -> Iterator[str]:
    """The address below which everything of `url` is served, and nothing else."""
    port = free_port()
    methods = ["GET", "HEAD", "POST"]
    app = Starlette(
        routes=[Mount(prefix, routes=[Route("/{path:path}", _Gateway(url).forward, methods=methods)])]
    )
    with serving(app, port):
        yield f"http://127.0.0.1:{port}{prefix}/"


@contextlib.contextmanager
def serving(app: Starlette, port: int) -> Iterator[None]:
    """An application on a loopback port, in a thread of its own."""
    config = uvicorn.Config(
        app, port=port, log_level="warning", lifespan="off", loop="asyncio", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_for("the server", lambda: server.started)
        yield
    finally:
        server.should_exit = True
        thread.join(30)

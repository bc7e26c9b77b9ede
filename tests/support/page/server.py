"""A server with the real page and a made-up cluster behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from support.page.made_up import MadeUp
from support.page.serving import serving
from support.processes.cluster import free_port
from triptych.proxy.page.endpoint import PageEndpoints


class _Api:
    def __init__(self, said: MadeUp) -> None:
        self.said = said

    def _refusal(self, request: Request) -> Response | None:
        if not self.said.key or request.headers.get("authorization") == f"Bearer {self.said.key}":
            return None
        error = {"message": "no API key was given: send the header Authorization: Bearer YOUR_KEY"}
        return JSONResponse({"error": error}, status_code=401)

    async def models(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse({"object": "list", "data": self.said.models})

    async def chat(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        self.said.asked.append(await request.json())
        headers = {"x-request-id": request.headers.get("x-request-id", "made-up")}
        return StreamingResponse(self._answer(), media_type="text/event-stream", headers=headers)

    async def _answer(self) -> AsyncIterator[str]:
        for word in self.said.reasoning.split():
            yield _event({"choices": [{"index": 0, "delta": {"reasoning_content": f"{word} "}}]})
        for word in self.said.answer.split(" "):
            await asyncio.sleep(0.01)
            yield _event({"choices": [{"index": 0, "delta": {"content": f"{word} "}}]})
        yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        yield _event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 17}})
        yield "data: [DONE]\n\n"

    async def finished(self, request: Request) -> Response:
        asked = request.query_params
        listed = self.said.finished(asked.get("order", ""), "failed" in asked, asked.get("model", ""))
        return self._refusal(request) or JSONResponse(listed)

    async def record(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse(self.said.record(request.path_params["name"]))

    async def events(self, request: Request) -> Response:
        self.said.connections += 1
        if refusal := self._refusal(request):
            return refusal
        if self.said.events_status != 200:
            error = {"message": f"not now {self.said.text}"}
            return JSONResponse({"error": error}, status_code=self.said.events_status)
        return StreamingResponse(self._snapshots(), media_type="text/event-stream")

    async def _snapshots(self) -> AsyncIterator[str]:
        yield _event(self.said.history(), "history")
        while self.said.events_status == 200:
            yield _event(self.said.snapshot(), "snapshot")
            await asyncio.sleep(self.said.tick)


def _event(data: Any, name: str = "") -> str:
    return f"{f'event: {name}' if name else ''}{chr(10) if name else ''}data: {json.dumps(data)}\n\n"


def make_page_app(said: MadeUp, prefix: str = "") -> Starlette:
    """The page with what `said` says behind it, below a path prefix."""
    api = _Api(said)
    routes = [
        Route("/v1/models", api.models),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/cluster/events", api.events),
        Route("/cluster/requests", api.finished),
        Route("/cluster/requests/{name}", api.record),
        *PageEndpoints().routes(),
    ]
    return Starlette(routes=[Mount(prefix, routes=routes)] if prefix else routes)


@contextlib.contextmanager
def page_server(said: MadeUp, prefix: str = "") -> Iterator[str]:
    """The address of a running page with made-up data."""
    port = free_port()
    with serving(make_page_app(said, prefix), port):
        try:
            yield f"http://127.0.0.1:{port}{prefix}/"
        finally:
            said.events_status = 503  # the streams end, and the server can

"""The HTTP front door. It translates and nothing else: what happens is the dispatcher's."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from triptych.config import MIB
from triptych.errors import NotFound
from triptych.proxy.call.chat import ChatCall, Done
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.http.exchange import JsonEndpoint, Pace, Reply
from triptych.proxy.http.metrics_page import MetricsPage
from triptych.proxy.openai.audio.endpoint import AudioEndpoint
from triptych.proxy.openai.chat.replies import SseStream, WholeReply, error_body
from triptych.proxy.openai.chat.request import ChatOptions, parse_body
from triptych.proxy.openai.chat.rich_replies import RichReply, RichStream
from triptych.proxy.openai.completions.endpoint import CompletionsEndpoint
from triptych.proxy.openai.openapi.docs_endpoints import DocsEndpoints
from triptych.proxy.openai.responses.endpoint import ResponsesEndpoint
from triptych.proxy.openai.tokenize import DetokenizeEndpoint, TokenizeEndpoint
from triptych.proxy.pd.queries import PDQueries, QueryTurns
from triptych.proxy.pool import WorkerPool


def make_app(
    dispatcher: Dispatcher,
    pool: WorkerPool,
    registry: CollectorRegistry,
    *,
    max_images: int = 16,
    max_body: int = 64 * MIB,
    request_timeout: float = 300.0,
    max_choices: int = 16,
    metrics: bool = True,
) -> Starlette:
    """The ASGI application of one proxy; `metrics` is whether /metrics is part of it."""
    chat = ChatEndpoint(
        dispatcher,
        max_images=max_images,
        max_choices=max_choices,
        max_body=max_body,
        timeout=request_timeout,
    )
    queries, turns = PDQueries(pool), QueryTurns(dispatcher.gate)
    completions = CompletionsEndpoint(
        dispatcher, queries, max_choices=max_choices, max_body=max_body, timeout=request_timeout
    )
    responses = ResponsesEndpoint(
        dispatcher, max_images=max_images, max_body=max_body, timeout=request_timeout
    )
    transcriptions, translations = (
        AudioEndpoint(dispatcher, queries, translates=translates, max_body=max_body, timeout=request_timeout)
        for translates in (False, True)
    )
    tokenize = TokenizeEndpoint(dispatcher, queries, turns, max_images=max_images, max_body=max_body)
    detokenize = DetokenizeEndpoint(dispatcher, queries, turns, max_body=max_body)
    state = StateEndpoints(dispatcher, pool, registry)
    pages = DocsEndpoints(max_choices=max_choices)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/responses", responses, methods=["POST"]),
            Route("/v1/audio/transcriptions", transcriptions, methods=["POST"]),
            Route("/v1/audio/translations", translations, methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/v1/models", state.models),
            Route("/version", pages.version),
            Route("/openapi.json", pages.document),
            Route("/docs", pages.page),
            Route("/health", state.health),
            Route("/ready", state.ready),
            *([Route("/metrics", state.metrics)] if metrics else []),
        ],
        exception_handlers={HTTPException: _http_error},
    )


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    shown = NotFound(f"{request.method} {request.url.path[:200]} is not served here")
    return JSONResponse(error_body(shown), status_code=error.status_code, headers=error.headers)


class StateEndpoints:
    """What is served about the proxy itself."""

    def __init__(self, dispatcher: Dispatcher, pool: WorkerPool, registry: CollectorRegistry) -> None:
        self._dispatcher = dispatcher
        self._pool = pool
        self._page = MetricsPage(registry)
        self._started = int(time.time())

    async def models(self, request: Request) -> Response:
        data = [
            {"id": name, "object": "model", "created": self._started, "owned_by": "triptych"}
            for name in self._pool.models()
        ]
        return JSONResponse({"object": "list", "data": data})

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        models = self._pool.live_models()
        body: dict[str, Any] = {"status": "ready", "models": models}
        if self._dispatcher.gate.draining:
            return JSONResponse({"status": "draining"}, status_code=503)
        if not models:
            return JSONResponse({"status": "no PD worker is live"}, status_code=503)
        if not self._pool.store_ok:
            body["degraded"] = "store"
        return JSONResponse(body)

    async def metrics(self, request: Request) -> Response:
        return Response(await self._page.text(), media_type=CONTENT_TYPE_LATEST)


class ChatEndpoint(JsonEndpoint[tuple[ChatCall, ChatOptions]]):
    """POST /v1/chat/completions."""

    def __init__(
        self, dispatcher: Dispatcher, *, max_images: int, max_body: int, timeout: float, max_choices: int = 16
    ) -> None:
        super().__init__(max_body=max_body)
        self._dispatcher = dispatcher
        self._max_images = max_images
        self._max_choices = max_choices
        self._timeout = timeout

    def parse(self, raw: bytes, request_id: str, content_type: bytes = b"") -> tuple[ChatCall, ChatOptions]:
        return parse_body(
            raw,
            request_id,
            max_images=self._max_images,
            timeout=self._timeout,
            max_choices=self._max_choices,
        )

    async def answer(self, request: tuple[ChatCall, ChatOptions], reply: Reply) -> None:
        call, options = request
        model = self._dispatcher.resolve_model(call.model)
        async with aclosing(self._dispatcher.chat(call)) as batches:
            if not options.stream:
                whole = (WholeReply if options.plain else RichReply)(call.label, model, options)
                async for outputs in batches:
                    whole.take(outputs)
                await reply.whole(whole.body())
                return
            stream = (SseStream if options.plain else RichStream)(call.label, model, options)
            pace = Pace()
            async for outputs in batches:
                if part := stream.render(outputs):
                    end = outputs[-1]
                    last = isinstance(end, Done) and end.final
                    await reply.part(part, last=last)
                    if not last:
                        await pace.written()

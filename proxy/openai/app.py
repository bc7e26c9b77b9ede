"""The HTTP front door. It translates and nothing else: what happens is the dispatcher's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych import __version__
from triptych.base.edges import load_edge
from triptych.base.errors import MethodNotAllowed, NotFound, RequestError
from triptych.base.tracing import attributes as names
from triptych.base.tracing.context import context_of
from triptych.base.tracing.server_span import ServerSpan
from triptych.base.tracing.tracer import Tracer
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.http.json_body import MESSAGES_PATH, error_body, retry_after
from triptych.proxy.openai.audio.endpoint import AudioEndpoint, TranslationEndpoint
from triptych.proxy.openai.chat.endpoint import ApiLimits, CallEndpoint, ChatEndpoint
from triptych.proxy.openai.completions.endpoint import CompletionsEndpoint
from triptych.proxy.openai.tokenize import DetokenizeEndpoint, TokenizeEndpoint
from triptych.proxy.pd.queries import PDQueries
from triptych.proxy.pool import WorkerPool
from triptych.proxy.quotas.current_call import current_call, in_call

#: The endpoints of POST requests by path.
ENDPOINTS: dict[str, type[CallEndpoint[Any]]] = {
    "/v1/chat/completions": ChatEndpoint,
    "/v1/completions": CompletionsEndpoint,
    "/v1/audio/transcriptions": AudioEndpoint,
    "/v1/audio/translations": TranslationEndpoint,
    "/tokenize": TokenizeEndpoint,
    "/detokenize": DetokenizeEndpoint,
}
#: Edges whose `ENDPOINTS` are served, too.
EDGES = (
    "responses.endpoint",
    "messages.endpoint",
    "retrieval.embeddings",
    "retrieval.ranking",
    "retrieval.pooling",
)
for _edge in EDGES:
    ENDPOINTS |= getattr(load_edge(f"triptych.proxy.openai.{_edge}"), "ENDPOINTS", {})


class TracedEndpoint:
    """One endpoint with a server span for each of its requests, which is part of the call.

    It wraps neither `receive` nor `send`: the reply's status comes from `HttpReply`, so no token passes here.
    """

    def __init__(self, endpoint: CallEndpoint[Any], path: str, tracer: Tracer) -> None:
        self._endpoint = endpoint
        self._operation = endpoint.operation
        self._path = path
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        span = ServerSpan(
            self._tracer,
            context_of(scope["headers"]),
            self._operation,
            {names.HTTP_METHOD: "POST", names.HTTP_ROUTE: self._path},
        )
        try:
            with in_call(span=span):
                await self._endpoint(scope, receive, send)
        finally:
            span.end()


def make_app(
    dispatcher: Dispatcher,
    pool: WorkerPool,
    registry: CollectorRegistry,
    limits: ApiLimits,
    *,
    metrics: bool = True,
    page: bool = True,
    live: Sequence[Route] = (),
    tracer: Tracer | None = None,
) -> FrontDoor:
    """The ASGI application of one proxy.

    `metrics`, `page`: whether /metrics and the page are part of it; `live`: the routes of its live data.
    """
    queries = PDQueries(pool)
    posts = {path: endpoint(dispatcher, queries, limits) for path, endpoint in ENDPOINTS.items()}
    rest = Starlette(
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
            Route("/version", version),
            *_state_routes(StateEndpoints(dispatcher, pool, registry), metrics=metrics),
            *_page_routes(page),
            *live,
        ],
    )
    # A path with a slash too many is an unknown one: 404 with the right one, as of any other.
    rest.router.redirect_slashes = False
    rest.add_exception_handler(HTTPException, partial(_http_error, _served(rest)))
    traced: dict[str, ASGIApp] = {}
    if tracer is not None:
        known = {path: endpoint for path, endpoint in posts.items() if endpoint.operation}
        traced = {path: TracedEndpoint(endpoint, path, tracer) for path, endpoint in known.items()}
    return FrontDoor({**posts, **traced}, rest)


def _page_routes(page: bool) -> list[Route]:
    """The routes of the edge: the API's description, and the page where it is wanted."""
    edge = load_edge("triptych.proxy.page.endpoint")
    if edge is None:
        return []
    routes: list[Route] = [Route("/openapi.json", edge.openapi)]
    return routes + edge.PageEndpoints().routes() if page else routes


class FrontDoor:
    """ASGI router: a POST goes straight to its endpoint, everything else to a Starlette application.

    Starlette's router and middleware would add coroutines to each request and to every token that it sends.
    """

    def __init__(self, posts: Mapping[str, ASGIApp], rest: Starlette) -> None:
        self._posts = posts
        self._rest = rest
        #: The paths that are served, with parts in braces that vary.
        self.routes = frozenset({*posts, *(route.path for route in rest.routes if isinstance(route, Route))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._posts.get(scope["path"]) if scope.get("method") == "POST" else None
        await (endpoint or self._rest)(scope, receive, send)


def _state_routes(state: StateEndpoints, *, metrics: bool) -> list[Route]:
    routes = [
        Route("/v1/models", state.models),
        # A name may have slashes.
        Route("/v1/models/{model:path}", state.model),
        Route("/health", state.health),
        Route("/ready", state.ready),
    ]
    return [*routes, Route("/metrics", state.metrics)] if metrics else routes


def _served(app: Starlette) -> list[str]:
    """The paths of the API that have no variable part."""
    return [route.path for route in app.routes if isinstance(route, Route) and "{" not in route.path]


async def _http_error(served: Sequence[str], request: Request, error: Exception) -> Response:
    """404 with the nearest path that is served, or 405 with the methods that are."""
    assert isinstance(error, HTTPException)
    path, headers = request.url.path[:200], error.headers or {}
    message = f"{request.method} {path} is not served here"
    if error.status_code == 405:
        refusal: RequestError = MethodNotAllowed(f"{message}: use {headers.get('Allow', 'another method')}")
    elif near := _nearest(path, served):
        refusal = NotFound(f"{message}; did you mean {near}?")
    else:
        refusal = NotFound(f"{message}: /openapi.json lists what is")
    return JSONResponse(error_body(refusal, path), status_code=error.status_code, headers=headers)


def _nearest(path: str, served: Sequence[str]) -> str | None:
    """The served path that ends as `path` does, or else is spelled like it."""
    tail = path.rstrip("/").rpartition("/v1/")[2].strip("/")
    same = (known for known in served if tail and known.endswith(f"/{tail}"))
    return next(same, None) or next(iter(get_close_matches(path, served, n=1, cutoff=0.75)), None)


async def version(request: Request) -> Response:
    return JSONResponse({"version": __version__})


class StateEndpoints:
    """Endpoints about the proxy itself: models, health, readiness, metrics."""

    def __init__(self, dispatcher: Dispatcher, pool: WorkerPool, registry: CollectorRegistry) -> None:
        self._dispatcher = dispatcher
        self._pool = pool
        self._page = MetricsPage(registry)
        self._started = int(time.time())

    async def models(self, request: Request) -> Response:
        allowed = current_call().models
        names = [*self._pool.models(allowed), *self._pool.adapters(allowed)]
        return JSONResponse({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, request: Request) -> Response:
        if not request.path_params["model"]:
            raise HTTPException(404)
        try:
            name = self._dispatcher.resolve_model(request.path_params["model"])
        except RequestError as error:
            wait = retry_after(error)
            headers = {} if wait is None else {"Retry-After": wait}
            # Both APIs have this path; Anthropic's clients name a version of theirs.
            shape = MESSAGES_PATH if "anthropic-version" in request.headers else ""
            return JSONResponse(error_body(error, shape), status_code=error.status, headers=headers)
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        lengths = self._pool.limits_of(name)
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "triptych",
            "root": name,
            # Of an adapter, the model that it is of.
            "parent": self._pool.base_of(name) or None,
            "max_model_len": max(lengths, default=None),
            "input_modalities": self._pool.kind(name).input_modalities,
            # As Anthropic's clients read it.
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._started, UTC).isoformat(),
        }

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        models = self._pool.live_models()
        body: dict[str, Any] = {"status": "ready", "models": models}
        if self._dispatcher.draining:
            return JSONResponse({"status": "draining"}, status_code=503)
        if not models:
            return JSONResponse({"status": "no PD worker is live"}, status_code=503)
        if self._pool.cut_off:
            return JSONResponse({"status": "cut off from the store"}, status_code=503)
        if not self._pool.store_ok:
            body["degraded"] = "store"
        return JSONResponse(body)

    async def metrics(self, request: Request) -> Response:
        return Response(await self._page.text(), media_type=CONTENT_TYPE_LATEST)


class MetricsPage:
    """The text of /metrics, generated in a thread, one at a time.

    Requests that arrive meanwhile share the next one: a text is never older than the request for it, and no
    number of clients makes more than one at once.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._making = asyncio.Lock()
        self._next: asyncio.Task[bytes] | None = None

    async def text(self) -> bytes:
        if self._next is None:
            self._next = asyncio.create_task(self._make())
        return await asyncio.shield(self._next)

    async def _make(self) -> bytes:
        async with self._making:
            self._next = None
            return await asyncio.to_thread(generate_latest, self._registry)

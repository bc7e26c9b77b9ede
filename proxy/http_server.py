"""The HTTP front door. It translates and nothing else: what happens is the dispatcher's."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from triptych.config import MIB, format_size
from triptych.errors import InternalError, InvalidRequest, NotFound, RequestError, TooLarge
from triptych.proxy.chat import ChatCall, Done
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.openai_replies import (
    DONE,
    SseStream,
    WholeReply,
    error_body,
    error_event,
    error_json,
    retry_after,
)
from triptych.proxy.openai_request import ChatOptions, parse_body
from triptych.proxy.pool import WorkerPool

log = logging.getLogger(__name__)

#: A client that takes nothing for so long is given up.
WRITE_SECONDS = 60.0
#: Least time between two writes to one client that takes a burst.
BURST_SECONDS = 0.005
#: Bodies above this are parsed off the event loop.
INLINE_BODY = 64 << 10
Headers = Sequence[tuple[bytes, bytes]]
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def make_app(
    dispatcher: Dispatcher,
    pool: WorkerPool,
    registry: CollectorRegistry,
    *,
    max_images: int = 16,
    max_body: int = 64 * MIB,
    request_timeout: float = 300.0,
    metrics: bool = True,
) -> Starlette:
    """The ASGI application of one proxy; `metrics` is whether /metrics is part of it."""
    chat = ChatEndpoint(dispatcher, max_images=max_images, max_body=max_body, timeout=request_timeout)
    state = StateEndpoints(dispatcher, pool, registry)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", state.models),
            Route("/health", state.health),
            Route("/ready", state.ready),
            *([Route("/metrics", state.metrics)] if metrics else []),
        ],
        exception_handlers={HTTPException: _http_error},
    )


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    shown = NotFound(f"{request.method} {request.url.path[:200]} is not served here")
    return JSONResponse(error_body(shown), status_code=error.status_code)


class StateEndpoints:
    """What is served about the proxy itself."""

    def __init__(self, dispatcher: Dispatcher, pool: WorkerPool, registry: CollectorRegistry) -> None:
        self._dispatcher = dispatcher
        self._pool = pool
        self._registry = registry
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
        if self._dispatcher.draining:
            return JSONResponse({"status": "draining"}, status_code=503)
        if not models:
            return JSONResponse({"status": "no PD worker is live"}, status_code=503)
        if not self._pool.store_ok:
            body["degraded"] = "store"
        return JSONResponse(body)

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


class ClientGone(Exception):
    """The client has closed its connection."""


class ChatEndpoint:
    """POST /v1/chat/completions as a plain ASGI application: the token path stays short."""

    def __init__(self, dispatcher: Dispatcher, *, max_images: int, max_body: int, timeout: float) -> None:
        self._dispatcher = dispatcher
        self._max_images = max_images
        self._max_body = max_body
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await _send_error(send, NotFound("use POST"), "-", status=405)
            return
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id", b""))
        reply = Reply(send, request_id)
        try:
            raw = await self._read(headers, receive)
            call, options = await self._parse(raw, request_id)
            del raw
            await self._serve(call, options, receive, reply)
        except ClientGone:
            log.info("request %s: the client has gone", request_id)
        except RequestError as error:
            await reply.error(error)
        except Exception:
            log.exception("request %s", request_id)
            await reply.error(InternalError("an unexpected error in the proxy"))

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        limit = f"the request body is above {format_size(self._max_body)}; send fewer or smaller pictures"
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._max_body:
            raise TooLarge(limit, param="body")
        chunks, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > self._max_body:
                raise TooLarge(limit, param="body")
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    async def _parse(self, raw: bytes, request_id: str) -> tuple[ChatCall, ChatOptions]:
        if not raw:
            raise InvalidRequest("the request body is empty: send JSON", param="body")

        def parse() -> tuple[ChatCall, ChatOptions]:
            return parse_body(raw, request_id, max_images=self._max_images, timeout=self._timeout)

        return parse() if len(raw) <= INLINE_BODY else await asyncio.to_thread(parse)

    async def _serve(self, call: ChatCall, options: ChatOptions, receive: Receive, reply: Reply) -> None:
        """Answers while watching the client: when it disconnects or takes nothing, everything is cancelled.

        One look now and then at the write that is under way costs less than a timer for each write.
        """
        answer = asyncio.create_task(self._answer(call, options, reply))
        watch = asyncio.create_task(_disconnect(receive))
        try:
            while not answer.done():
                await asyncio.wait(
                    (answer, watch), timeout=WRITE_SECONDS / 4, return_when=asyncio.FIRST_COMPLETED
                )
                if not answer.done() and (watch.done() or reply.stalled(WRITE_SECONDS)):
                    raise ClientGone
            await answer
        finally:
            for task in (answer, watch):
                task.cancel()
            await asyncio.gather(answer, watch, return_exceptions=True)

    async def _answer(self, call: ChatCall, options: ChatOptions, reply: Reply) -> None:
        model = self._dispatcher.resolve_model(call.model)
        async with aclosing(self._dispatcher.chat(call)) as batches:
            if not options.stream:
                whole = WholeReply(call.request_id, model, options)
                async for outputs in batches:
                    whole.take(outputs)
                await reply.whole(whole.body())
                return
            stream = SseStream(call.request_id, model, options)
            pace = Pace()
            async for outputs in batches:
                if part := stream.render(outputs):
                    last = isinstance(outputs[-1], Done)
                    await reply.part(part, last=last)
                    if not last:
                        await pace.written()


class Pace:
    """Gathers the tokens of a burst: a write costs more than a token.

    Tokens that come no faster than every 10 ms are written as they come, and so are the first and the
    second write after a pause: an answer's first token and its end do not wait.
    """

    def __init__(self) -> None:
        self._last = 0.0

    async def written(self) -> None:
        now = asyncio.get_running_loop().time()
        close, self._last = now - self._last < 2 * BURST_SECONDS, now
        if close:
            await asyncio.sleep(BURST_SECONDS)


class Reply:
    """One HTTP reply: nothing is sent before the first part, so that errors still have their status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send_now = send
        self._request_id = request_id
        self._begun = False
        self._clock = asyncio.get_running_loop().time
        #: When the write that is under way began.
        self._writing_since: float | None = None

    def stalled(self, seconds: float) -> bool:
        """Whether the client has not taken the current write for so long."""
        return self._writing_since is not None and self._clock() - self._writing_since >= seconds

    async def part(self, data: bytes, *, last: bool = False) -> None:
        if not self._begun:
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ]
            await self._start(200, headers)
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def whole(self, data: bytes, status: int = 200, extra: Headers = ()) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await self._start(status, [*headers, *extra])
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def error(self, error: RequestError, status: int | None = None) -> None:
        """A status before the first byte, an SSE error event after it."""
        wait = retry_after(error)
        extra = [(b"retry-after", wait.encode())] if wait else []
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                if self._begun:
                    await self.part(error_event(error) + DONE, last=True)
                else:
                    await self.whole(error_json(error), status or error.status, extra)
        except (TimeoutError, ClientGone):
            log.info("request %s: the client has not taken its error", self._request_id)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._begun = True
        headers.append((b"x-request-id", self._request_id.encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send(self, message: Message) -> None:
        self._writing_since = self._clock()
        try:
            await self._send_now(message)
        except OSError:
            raise ClientGone from None
        finally:
            self._writing_since = None


async def _send_error(send: Send, error: RequestError, request_id: str, *, status: int) -> None:
    await Reply(send, request_id).error(error, status)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _request_id(given: bytes) -> str:
    """The client's id if it is fit for logs, else a new one."""
    text = given.decode("latin-1")
    return text if _REQUEST_ID.fullmatch(text) else uuid.uuid4().hex

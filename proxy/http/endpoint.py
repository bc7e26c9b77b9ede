"""One POST as plain ASGI: a body in, counted as it comes; its delivery, one reply or events, out."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Generic, TypeVar

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.base.config import format_size
from triptych.base.errors import (
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    RequestError,
    TooLarge,
    printable,
)
from triptych.base.log import log_fields
from triptych.proxy.http.field_names import ignored_header, names_of
from triptych.proxy.http.json_body import FEW_VALUES, count_values, error_event, error_json, retry_after
from triptych.proxy.parsing.parse import Parse
from triptych.proxy.parsing.parsers import INLINE_BYTES, THREAD_BYTES, Parsers
from triptych.proxy.quotas.current_call import current_call
from triptych.proxy.quotas.quota import Quota

logger = logging.getLogger(__name__)

#: Seconds after which a client that takes nothing is given up.
WRITE_SECONDS = 60.0
#: A reply goes out in such pieces, each when the client has taken most of those before it.
PIECE_BYTES = 64 << 10
#: Least time between two writes to one client that takes a burst.
BURST_SECONDS = 0.005
Headers = Sequence[tuple[bytes, bytes]]
_STREAM_HEADERS: Headers = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
P = TypeVar("P")
B = TypeVar("B")


class ClientGone(Exception):
    """The client has closed its connection."""


class PostEndpoint(ABC, Generic[P]):
    """A POST endpoint as a plain ASGI application: the token path stays short.

    A subclass says what a body means and how it is answered; a RequestError of either becomes the reply.
    """

    #: What an empty body, and one above the limit, should have been.
    expected = "send JSON"
    smaller = "send fewer or smaller pictures"
    #: The fields that a body may have; others are named in a header, or refused.
    body: type[msgspec.Struct]
    reject_unknown = False

    def __init__(self, parsers: Parsers, *, max_body: int) -> None:
        self._parsers = parsers
        self._max_body = max_body

    @abstractmethod
    def parse(self, request_id: str, content_type: bytes = b"") -> Parse[P]:
        """How a body becomes the request; the parse of a large one is tried in a process before."""

    @abstractmethod
    async def answer(self, request: P, reply: HttpReply) -> None:
        """Sends the whole reply. Cancelled when the client goes or takes nothing."""

    def check_place(self) -> None:
        """QuotaExceeded where the client could have no place now, however its request reads."""

    def names(self, raw: bytes, request: P) -> Iterable[str]:
        """The names of the fields that the body has."""
        return names_of(raw)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id", b""))
        reply = HttpReply(send, request_id, scope.get("path", ""))
        if scope["method"] != "POST":
            await reply.error(MethodNotAllowed("use POST"))
            return
        try:
            await self._serve(await self._request(headers, receive, reply), receive, reply)
        except ClientGone:
            logger.info("request %s: the client has gone", request_id, extra=log_fields(label=request_id))
        except RequestError as error:
            # Its frames hold the body's text, and the next body is parsed soon.
            error.drop_traceback()
            await reply.error(error)
        except Exception:
            logger.exception("request %s", request_id, extra=log_fields(label=request_id))
            await reply.error(InternalError("an unexpected error in the proxy"))

    async def _request(self, headers: dict[bytes, bytes], receive: Receive, reply: HttpReply) -> P:
        if (coding := headers.get(b"content-encoding", b"identity")).lower() != b"identity":
            named = printable(coding[:40].decode("latin-1"))
            raise InvalidRequest(
                f"bodies are not unpacked here, and Content-Encoding is {named}: send it as it is",
                param="body",
            )
        raw = await self._read(headers, receive)
        if not raw:
            raise InvalidRequest(f"the request body is empty: {self.expected}", param="body")
        content_type = headers.get(b"content-type", b"")
        parse = self.parse(reply.request_id, content_type)
        few = len(raw) <= INLINE_BYTES and count_values(raw) <= FEW_VALUES
        work = partial(self._parsed, parse, reply)
        return await self._parsers.run(current_call().holder, raw, parse, work, few=few)

    def _parsed(self, parse: Parse[P], reply: HttpReply, raw: bytes) -> P:
        request = parse(raw)
        names = self.names(raw, request)
        reply.headers = ignored_header(names, self.body.__struct_fields__, reject=self.reject_unknown)
        return request

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        length = headers.get(b"content-length", b"")
        announced = int(length) if length.isdigit() else 0
        chunks, size, has_place = [], 0, False
        while max(size, announced) <= self._max_body:
            if not has_place and max(size, announced) > THREAD_BYTES:
                # To read and parse so much costs everybody more than the refusal does.
                self.check_place()
                has_place = True
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size <= self._max_body and not message.get("more_body", False):
                return await _joined(chunks, size)
        limit = format_size(self._max_body)
        raise TooLarge(f"the request body is above {limit}; {self.smaller}", param="body")

    async def _serve(self, request: P, receive: Receive, reply: HttpReply) -> None:
        """Answers while watching the client: when it disconnects or takes nothing, everything is cancelled.

        One check now and then of the write that is under way costs less than a timer for each write.
        """
        watch = asyncio.create_task(_disconnect(receive))
        answer = asyncio.create_task(self.answer(request, reply))
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
            # An error's traceback holds this frame, and the task the error: a cycle would keep the body.
            del answer, watch, task


async def _joined(chunks: list[bytes], size: int) -> bytes:
    """The chunks as one; many are joined in a thread, which lets the interpreter's lock go meanwhile."""
    if size <= THREAD_BYTES:
        return b"".join(chunks)
    return await asyncio.to_thread(b"".join, chunks)


class BodyMiddleware:
    """Counts a request's body as it arrives, and until the request has been answered.

    `LimitedConnection` keeps the deadlines of its arrival.
    """

    def __init__(self, app: ASGIApp, bodies: Quota) -> None:
        self._app = app
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._bodies.hold(current_call().holder) as hold:

            async def counted() -> Message:
                """The next message; QuotaExceeded when its bytes do not fit."""
                message = await receive()
                if size := len(message.get("body", b"")):
                    hold.add(size)
                return message

            await self._app(scope, counted, send)


class WritePacer:
    """A pacer of writes that gathers the tokens of a burst: a write costs more than a token.

    Tokens that come no faster than every 10 ms are written as they come, and so are the first and the
    second write after a pause: an answer's first token and its end do not wait.
    """

    def __init__(self) -> None:
        self._last = 0.0
        self._clock = asyncio.get_running_loop().time

    def pause(self) -> float:
        """Seconds to wait after the write that has just been made; mostly 0."""
        now = self._clock()
        close, self._last = now - self._last < 2 * BURST_SECONDS, now
        return BURST_SECONDS if close else 0.0


class HttpReply:
    """One HTTP reply: nothing is sent before the first part, so that errors still have their status."""

    def __init__(self, send: Send, request_id: str, path: str = "") -> None:
        self._send_now = send
        #: Of the request: errors have its API's shape.
        self._path = path
        self.request_id = request_id
        #: Of every reply to this request, whatever its status.
        self.headers: Headers = ()
        self._begun = False
        call = current_call()
        self._span = call.span
        self._clock = asyncio.get_running_loop().time
        #: When the write that is under way began.
        self._writing_since: float | None = None
        self._delivery = call.delivery
        self._taken = 0

    def stalled(self, seconds: float) -> bool:
        """Whether the client has taken nothing of the current write for that long."""
        taken = 0 if self._delivery is None else self._delivery.taken
        if self._writing_since is not None and taken != self._taken:
            self._taken, self._writing_since = taken, self._clock()
        return self._writing_since is not None and self._clock() - self._writing_since >= seconds

    def part(self, data: bytes, *, last: bool = False) -> Awaitable[None]:
        """Sends a part of a stream; to be awaited. Called for every token, so it adds no coroutine."""
        message = {"type": "http.response.body", "body": data, "more_body": not last}
        return self._send(message) if self._begun else self._first_part(message)

    async def stream(self, batches: AsyncIterable[B], render: Callable[[B], tuple[bytes, bool]]) -> None:
        """Sends batches as they come; `render` gives a batch's bytes, and whether they are the last ones."""
        pace = WritePacer()
        async for batch in batches:
            part, last = render(batch)
            if part:
                await self.part(part, last=last)
                if not last and (pause := pace.pause()):
                    await asyncio.sleep(pause)

    async def _first_part(self, message: Message) -> None:
        await self._start(200, list(_STREAM_HEADERS))
        await self._send(message)

    async def whole(
        self,
        data: bytes,
        status: int = 200,
        extra: Headers = (),
        *,
        content_type: bytes = b"application/json",
    ) -> None:
        if self._delivery is not None:
            self._delivery.cover(len(data))
        headers = [(b"content-type", content_type), (b"content-length", str(len(data)).encode())]
        await self._start(status, [*headers, *extra])
        for at in range(0, len(data) or 1, PIECE_BYTES):
            await self.part(data[at : at + PIECE_BYTES], last=at + PIECE_BYTES >= len(data))

    async def error(
        self, error: RequestError, status: int | None = None, *, event: bytes | None = None
    ) -> None:
        """A status before the first byte, an SSE error event after it: `event`, where an API has its own."""
        if self._span is not None:
            self._span.failed(error.code)
            if self._begun:
                self._span.broken(error.code)
        wait = retry_after(error)
        extra = [(b"retry-after", wait.encode())] if wait else []
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                if self._begun:
                    await self.part(error_event(error, self._path) if event is None else event, last=True)
                else:
                    await self.whole(error_json(error, self._path), status or error.status, extra)
        except (TimeoutError, ClientGone):
            label = self.request_id
            logger.info(
                "request %s: the client has not taken its error", label, extra=log_fields(label=label)
            )

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._begun = True
        if self._span is not None:
            self._span.http_status(status)
        headers += [(b"x-request-id", self.request_id.encode()), *self.headers]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send(self, message: Message) -> None:
        self._writing_since = self._clock()
        try:
            await self._send_now(message)
        except OSError:
            raise ClientGone from None
        finally:
            self._writing_since = None


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _request_id(given: bytes) -> str:
    """The client's id if it is fit for logs, else a new one."""
    text = given.decode("latin-1")
    return text if _REQUEST_ID.fullmatch(text) else secrets.token_hex(16)

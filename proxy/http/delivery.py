"""The delivery of one reply: what it holds of the memory for replies until its client has taken it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.base.errors import RequestError
from triptych.proxy.http.json_body import error_json, retry_after
from triptych.proxy.quotas.current_call import current_call, in_call
from triptych.proxy.quotas.quota import Hold, Quota, QuotaExceeded

#: Where a request's scope has its `Connection`.
CONNECTION = "triptych.connection"
#: Replies up to this size are not counted: what a socket's buffer holds anyway.
SMALL_REPLY = 64 << 10


class Connection(Protocol):
    """The client's connection as a reply needs it."""

    @property
    def holder(self) -> str:
        """Whose it is before its key is known."""

    @property
    def unsent(self) -> int:
        """Bytes in the buffers of this process."""

    @property
    def taken(self) -> int:
        """Bytes that have left them."""

    async def sent(self) -> None:
        """Returns once nothing is unsent, or the connection has ended."""

    async def caught_up(self) -> None:
        """Returns once the client's system has acknowledged all but a `SMALL_REPLY`, or at the end."""


class Delivery:
    """What one reply holds; `holder` is the principal's id, empty where no keys are in use."""

    def __init__(self, quota: Quota, holder: str, connection: Connection | None) -> None:
        self._quota = quota
        self._holder = holder
        self._connection = connection
        self._holds: list[Hold] = []
        self._stack = ExitStack()

    @property
    def unsent(self) -> int:
        return 0 if self._connection is None else self._connection.unsent

    @property
    def taken(self) -> int:
        return 0 if self._connection is None else self._connection.taken

    def keep(self, hold: Hold) -> None:
        """The memory of the reply counts until its end."""
        self._holds.append(hold)
        self.at_end(hold.close)

    def at_end(self, callback: Callable[[], None]) -> None:
        self._stack.callback(callback)

    def cover(self, nbytes: int) -> None:
        """The reply is complete and has this many bytes. QuotaExceeded where there is no memory for it."""
        surplus = sum(hold.amount for hold in self._holds) - nbytes
        for hold in self._holds:
            if surplus > 0:
                part = min(surplus, hold.amount)
                hold.remove(part)
                surplus -= part
        if surplus < 0 and nbytes > SMALL_REPLY:
            self.keep(self._quota.hold(self._holder, -surplus))

    def close(self) -> None:
        """The client has the reply, or has gone."""
        self._stack.close()


class DeliveryMiddleware:
    """ASGI middleware: a request lasts until its client has taken the reply, or the connection has ended.

    An endpoint of POSTs counts its replies itself. Those to GETs are counted here, and the next one of a
    connection is not made before the client has taken those before it: else a client that asks for many at
    once and reads nothing fills the kernel's buffers, which no budget sees.
    """

    def __init__(self, app: ASGIApp, quota: Quota) -> None:
        self._app = app
        self._quota = quota

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection | None = scope.get(CONNECTION)
        delivery = Delivery(self._quota, current_call().holder, connection)
        counts_itself = scope["method"] == "POST"
        try:
            with in_call(delivery=delivery):
                if counts_itself or connection is None:
                    await self._app(scope, receive, send)
                else:
                    await connection.caught_up()
                    await self._app(scope, receive, CountedReply(delivery, send))
            if connection is not None:
                await connection.sent()
                if not counts_itself:
                    await connection.caught_up()
        finally:
            delivery.close()


class CountedReply:
    """A `send` that counts a reply in one piece before its first byte leaves; without memory it is a 429."""

    def __init__(self, delivery: Delivery, send: Send) -> None:
        self._delivery = delivery
        self._send = send
        self._start: Message | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        if self._start is not None:
            start, self._start = self._start, None
            try:
                if not message.get("more_body", False):
                    self._delivery.cover(len(message.get("body", b"")))
            except QuotaExceeded as error:
                start, message = _refusal(error)
            await self._send(start)
        await self._send(message)


def _refusal(error: RequestError) -> tuple[Message, Message]:
    body = error_json(error)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", (retry_after(error) or "1").encode()),
    ]
    start = {"type": "http.response.start", "status": error.status, "headers": headers}
    return start, {"type": "http.response.body", "body": body}

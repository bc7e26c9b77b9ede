"""Delivery: the way of one reply to its client, and what is held until the client has all of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from triptych.proxy.quotas.quota import HOLDER, Hold, Quota

#: Where a request's scope has its `Connection`.
CONNECTION = "triptych.connection"
#: Replies up to this size are not counted: what a socket's buffer holds anyway.
SMALL_REPLY = 64 << 10


class Connection(Protocol):
    """The client's connection as a reply needs it."""

    @property
    def unsent(self) -> int:
        """Bytes in the buffers of this process."""

    @property
    def taken(self) -> int:
        """Bytes that have left them."""

    async def sent(self) -> None:
        """Returns once nothing is unsent, or the connection has ended."""


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


#: The delivery of the reply that the running code makes; None where nothing is known of its connection.
CURRENT_DELIVERY: ContextVar[Delivery | None] = ContextVar("delivery", default=None)


class DeliveryMiddleware:
    """ASGI middleware: a POST lasts until its client has taken the reply, or the connection has ended."""

    def __init__(self, app: ASGIApp, quota: Quota) -> None:
        self._app = app
        self._quota = quota

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        connection: Connection | None = scope.get(CONNECTION)
        delivery = Delivery(self._quota, HOLDER.get(), connection)
        token = CURRENT_DELIVERY.set(delivery)
        try:
            await self._app(scope, receive, send)
            if connection is not None:
                await connection.sent()
        finally:
            CURRENT_DELIVERY.reset(token)
            delivery.close()

"""The last answer of each connection of a proxy that leaves: it tells the client to open another one."""

from __future__ import annotations

from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_CLOSE = (b"connection", b"close")


class ClosingMiddleware:
    """Adds `Connection: close` to every answer once `closing` is set."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.closing = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def last(message: Message) -> Awaitable[None]:
            if self.closing and message["type"] == "http.response.start":
                headers = [pair for pair in message.get("headers", ()) if pair[0].lower() != b"connection"]
                message = {**message, "headers": [*headers, _CLOSE]}
            return send(message)  # no coroutine of its own: it is called for every token

        await self._app(scope, receive, last)

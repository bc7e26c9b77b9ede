"""Memory for the bodies of all requests in flight: above it new ones are refused while they arrive."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.errors import Overloaded

RETRY_AFTER = 2.0


class BodyBudget:
    """ASGI middleware. A body counts as it arrives, and until its request has been answered."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.nbytes = 0
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = 0

        async def counted() -> Message:
            """The next message; Overloaded when its bytes find no room."""
            nonlocal held
            message = await receive()
            size = len(message.get("body", b""))
            if size:
                if self.nbytes + size > self._limit:
                    raise Overloaded(
                        "the bodies of the requests in flight fill the room for them (--body-memory)",
                        retry_after=RETRY_AFTER,
                    )
                self.nbytes += size
                held += size
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self.nbytes -= held

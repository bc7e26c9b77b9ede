"""The ASGI middleware that counts the bytes of request bodies."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.proxy.http.body_budget import BodyBudget


class BodyBudgetMiddleware:
    """Counts a body as it arrives, and until its request has been answered."""

    def __init__(self, app: ASGIApp, budget: BodyBudget) -> None:
        self._app = app
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        held = 0

        async def counted() -> Message:
            """The next message; Overloaded when its bytes find no room."""
            nonlocal held
            message = await receive()
            if size := len(message.get("body", b"")):
                self._budget.add(size)
                held += size
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._budget.remove(held)

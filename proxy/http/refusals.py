"""Refusals: requests that end with an error before they are calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

import msgspec
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.base.errors import RequestError, printable
from triptych.base.metrics import ProxyMetrics
from triptych.proxy.http.connections import OPEN_PATHS
from triptych.proxy.http.json_body import error_body, retry_after
from triptych.proxy.quotas.call_context import Arrival
from triptych.proxy.quotas.current_call import in_call

SECONDS = 60.0
#: Characters of an event's text in the log.
_SHOWN = 300


class PeriodicLog:
    """The lines of one logger. The caller bounds the number of kinds, and an event costs no line of its own.

    `later(seconds, function)` schedules a call, as an event loop's `call_later`.
    """

    def __init__(
        self, logger: logging.Logger, later: Callable[[float, Callable[[], None]], object] | None = None
    ) -> None:
        self._logger = logger
        self._later = later
        #: Of each kind that was logged in the last minute, the events since, and the last one's text.
        self._since: dict[str, tuple[int, str]] = {}

    def add(self, kind: str, text: str, level: int = logging.INFO) -> None:
        """An event; `text` may hold a client's words."""
        if kind in self._since:
            self._since[kind] = self._since[kind][0] + 1, text
        else:
            self._tell(level, kind, text)

    def _tell(self, level: int, kind: str, text: str) -> None:
        shown = printable(text[:_SHOWN])
        self._logger.log(level, "%s: %s", kind, shown)
        self._since[kind] = 0, ""
        (self._later or asyncio.get_running_loop().call_later)(
            SECONDS, lambda: self._minute_over(level, kind)
        )

    def _minute_over(self, level: int, kind: str) -> None:
        count, text = self._since.pop(kind)
        if count:
            self._tell(level, kind, f"{count} more in {SECONDS:.0f} s, the last: {text}")


logger = logging.getLogger(__name__)

#: The route of a path that is not served.
OTHER = "other"


class Refusals:
    """Counts and logs refusals by status and route, of which `show` hears, too."""

    def __init__(self, metrics: ProxyMetrics, show: Callable[[int, str], None] | None = None) -> None:
        self._metrics = metrics
        self._show = show
        self._log = PeriodicLog(logger)

    def add(self, status: int, route: str, code: str) -> None:
        self._metrics.requests.labels(str(status), route).inc()
        self._log.add(f"{route} refused with {status}", code)
        if self._show is not None:
            self._show(status, route)


class RefusalMiddleware:
    """ASGI middleware, the outermost: an error that no call counts is a refusal."""

    def __init__(self, app: ASGIApp, routes: Iterable[str], refusals: Refusals) -> None:
        self._app = app
        self._routes = frozenset(routes)
        #: Of routes with a part in braces, what stands before it.
        self._prefixes = tuple((route.partition("{")[0], route) for route in self._routes if "{" in route)
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival, status, body = Arrival(self.route_of(scope["path"])), 0, b""

        def watched(message: Message) -> Awaitable[None]:
            nonlocal status, body
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= 400 and not body:
                body = message.get("body", b"")
            return send(message)  # no coroutine of its own: it is called for every token

        try:
            with in_call(arrival=arrival):
                await self._app(scope, receive, watched)
        finally:
            if status >= 400 and not arrival.counted and scope["path"] not in OPEN_PATHS:
                self._refusals.add(status, arrival.route, _code(body))

    def route_of(self, path: str) -> str:
        """The route that serves a path: a label of few values, whatever clients send."""
        if path in self._routes:
            return path
        return next((route for prefix, route in self._prefixes if path.startswith(prefix)), OTHER)


def _code(body: bytes) -> str:
    """The code of an error's body: of few values, where the message may hold a client's words."""
    try:
        return str(msgspec.json.decode(body)["error"]["code"])
    except (msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError):
        return "no code"


async def refuse(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends an error, in the shape of its path's API, before the request is read."""
    headers: dict[str, str] = {}
    if wait := retry_after(error):
        headers["retry-after"] = wait
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    await JSONResponse(error_body(error, scope["path"]), error.status, headers)(scope, receive, send)

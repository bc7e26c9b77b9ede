"""Limits on client connections: time for heads, for bodies and for unread replies, and their number."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from dataclasses import dataclass
from typing import Any, cast

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from triptych.base.errors import InvalidRequest, RequestError, RequestTimeout, TooLarge
from triptych.proxy.http.counted_transport import CountedTransport
from triptych.proxy.http.delivery import CONNECTION, SMALL_REPLY
from triptych.proxy.http.json_body import closing_reply, error_json
from triptych.proxy.http.lingering import LINGER_BYTES, Lingering
from triptych.proxy.http.peers import BadHeader, parse_header
from triptych.proxy.http.places import BUSY, ConnectionPlaces, Place
from triptych.proxy.turns.loop_turns import LoopTurns

logger = logging.getLogger(__name__)

#: More files than this are never asked for.
MAX_FILES = 65536
#: After which it is first looked whether a client has taken its reply.
_FIRST_LOOK_SECONDS = 0.005
#: Paths of probes: they answer without a key, and even when there are too many connections.
OPEN_PATHS = frozenset({"/health", "/ready"})
#: Further paths that answer without a key: files that are the same for everybody.
KEYLESS_PATHS = frozenset({"/", "/docs"})
KEYLESS_FOLDER = "/page/"
#: Of a head, or of a body in chunks, the parser gets so much at once: a callback for each of the shortest
#: headers or chunks in it, all together less than a millisecond.
PIECE_BYTES = 4 << 10
#: Bytes that wait for their turn before a connection is not read any more. Up to there its end is noticed.
HELD_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Seconds and bytes. `spare`: connections beyond their quota that get a 503."""

    #: For a request's head; as long again for a TLS handshake before it.
    head_seconds: float = 10.0
    #: Of a request's line and headers, beyond the first piece of them.
    head_bytes: int = 64 << 10
    #: A body must bring, and a client that lets replies pile up must take, `min_bytes` in each such window.
    window_seconds: float = 30.0
    min_bytes: int = 16 << 10
    #: In which a body must have arrived as a whole.
    body_seconds: float = 300.0
    sweep_seconds: float = 1.0
    spare: int = 256


def needs_key(path: str) -> bool:
    """Whether a path is answered with a valid key only, where keys are in use."""
    return path not in OPEN_PATHS and path not in KEYLESS_PATHS and not path.startswith(KEYLESS_FOLDER)


class HeadTooLarge(TooLarge):
    status = 431


def raise_file_limit() -> int:
    """Asks for as many open files as this process may have; the number that it now may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft == resource.RLIM_INFINITY or soft >= target:
        return MAX_FILES if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    except (OSError, ValueError) as error:
        logger.warning("the limit of open files stays at %d: %s", soft, error)
        return soft
    return target


class HeldFlow(FlowControl):
    """uvicorn's flow control, which reads nothing while too much has been read and waits."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()

    def hold(self, held: bool) -> None:
        before, self.held = self.held, held
        if held:
            self.pause_reading()
        elif before:
            self.resume_reading()


class LimitedConnection(HttpToolsProtocol):
    """uvicorn's connection, which notes what it waits for; a `Sweeper` ends those that wait too long.

    Its bytes are parsed in turns with other connections', a head at a time, and a head once the request
    before it has its reply. `address`: the client's, where the PROXY protocol has named it.
    """

    limits = ConnectionLimits()
    places: ConnectionPlaces
    turns: LoopTurns
    flow: HeldFlow

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
        address: str | None = None,
        place: Place | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._address = address
        #: Its place among the connections; None while it has none.
        self._place = place
        #: Bytes that have been read and not been parsed, and whether they wait for their turn.
        self._rest = b""
        self._asked = False
        #: Bytes of the body that are missing, where its head says how many it has.
        self._missing = 0
        #: The parts of the body in the bytes that are being parsed: one for each of its chunks.
        self._parts: list[bytes] = []
        #: The bytes of a PROXY header that is not complete yet; None where none is expected.
        self._header: bytes | None = None
        self._served_app = self.app
        #: When the wait for a request's head began; None while none is awaited.
        self._head_since: float | None = None
        self._head_begun = False
        self._head_bytes = 0
        #: Beginning of the current window of a body's arrival, and the bytes that it has brought.
        self._body_since: float | None = None
        self._body_begun = 0.0
        self._arrived = 0
        #: Beginning of the current window of a reply's leaving, and the bytes that had been taken then.
        self._unsent_since: float | None = None
        self._taken = 0
        #: How many requests wait until the client has caught up.
        self._waiting = 0
        #: Set once the connection drops what comes.
        self._lingering: Lingering | None = None

    @property
    def holder(self) -> str:
        """Whose connection it is before its key is known: its address, or empty where that has no bound."""
        hold = None if self._place is None else self._place.hold
        return "" if hold is None else hold.holder

    @property
    def unsent(self) -> int:
        """Bytes that wait for the client."""
        return self._counted.unsent

    @property
    def taken(self) -> int:
        """Bytes that the client has taken."""
        return self._counted.taken

    async def sent(self) -> None:
        """Returns once the client has taken everything, or the connection has ended."""
        if self.unsent:
            self.transport.set_write_buffer_limits(high=0)
            await self.flow.drain()
            self.transport.set_write_buffer_limits(high=HIGH_WATER_LIMIT)

    async def caught_up(self) -> None:
        """Returns once all but a small reply has been acknowledged, or at the connection's end.

        The kernel tells nobody when its buffers empty, so it is asked, and ever less often.
        """
        pause = _FIRST_LOOK_SECONDS
        self._waiting += 1
        try:
            while not self.transport.is_closing() and self._counted.behind > SMALL_REPLY:
                await asyncio.sleep(pause)
                pause = min(2 * pause, self.limits.sweep_seconds)
        finally:
            self._waiting -= 1

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._counted = CountedTransport(transport, self._linger)
        super().connection_made(cast(asyncio.Transport, self._counted))
        self.flow = HeldFlow(cast(asyncio.Transport, self._counted))
        self._head_since = self.loop.time()
        peer = self.client[0] if self.client else ""
        if self._place is not None:
            self._serve_place()
        elif self._address is None and self.places.has_header(peer):
            self._header = b""
        else:
            self._take_place(peer if self._address is None else self._address)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._place is not None:
            self._place.close()

    def _take_place(self, address: str) -> None:
        self._place = self.places.take(address)
        if self._place is None:
            self._tell(BUSY)
        else:
            self._serve_place()

    def _serve_place(self) -> None:
        if self._place is not None and not self._place.served:
            self.app = Busy(self._served_app)

    def _read_header(self, data: bytes) -> bytes:
        """What comes after the PROXY header."""
        self._header = (self._header or b"") + data
        try:
            parsed = parse_header(self._header)
        except BadHeader:
            self.transport.abort()
            return b""
        if parsed is None:
            return b""
        rest, self._header = self._header[parsed[1] :], None
        self._take_place(parsed[0])
        return b"" if self.transport.is_closing() else rest

    def data_received(self, data: bytes) -> None:
        if self._header is not None and not (data := self._read_header(data)):
            return
        self._rest = self._rest + data if self._rest else data
        self.flow.hold(len(self._rest) > HELD_BYTES)
        self._proceed()

    def _proceed(self) -> None:
        """Asks for a turn, if bytes wait and the request before them has its reply."""
        if self._asked or not self._rest:
            return
        reads_on = self._body_since is not None or self._lingering is not None
        if reads_on or self.cycle is None or self.cycle.response_complete:
            self._asked = True
            self.turns.ask(self.holder, self._step)

    def _step(self) -> None:
        self._asked = False
        if self.transport.is_closing():
            size, self._rest = len(self._rest), b""
            if self._lingering is not None:
                self.flow.hold(False)
                self._lingering.drop(size, self.loop.time())
            return
        size = self._piece()
        piece, self._rest = self._rest[:size], self._rest[size:]
        self.flow.hold(len(self._rest) > HELD_BYTES)
        # Line breaks between requests end uvicorn's keep-alive timer and begin no request.
        if self._head_since is None and self._body_since is None:
            self._head_since = self.loop.time()
        in_head = self._head_begun
        self._parse(piece)
        if in_head and self._head_begun and not self.transport.is_closing():
            self._head_bytes += len(piece)
            if self._head_bytes > self.limits.head_bytes:
                self._tell(HeadTooLarge("the request's headers are too large"))
        self._proceed()

    def _parse(self, piece: bytes) -> None:
        """As uvicorn does, but for a line in the log for whoever sends no HTTP, or wants another protocol."""
        self._unset_keepalive_if_required()
        # A request for an upgrade is answered as one without.
        with contextlib.suppress(httptools.HttpParserUpgrade):
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserError:
                self.send_400_response("")
        self._hand_on()

    def _piece(self) -> int:
        """How many of the bytes that wait are parsed at once: no second request's among them."""
        if self._body_since is not None:
            return self._missing or PIECE_BYTES
        end = self._rest.find(b"\r\n\r\n", 0, PIECE_BYTES)
        return PIECE_BYTES if end < 0 else end + 4

    def on_message_begin(self) -> None:
        self._head_since, self._head_begun = self.loop.time(), True
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[CONNECTION] = self

    def on_headers_complete(self) -> None:
        self._head_since, self._head_begun, self._head_bytes = None, False, 0
        self._body_since = self._body_begun = self.loop.time()
        self._arrived = 0
        self._missing = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        if self._place is not None and self._place.of_gateway:
            served = self.places.move(self._place, self.headers)
            self.app = self._served_app if served else Busy(self._served_app)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def _hand_on(self) -> None:
        """What has been parsed of the body, as one: chunks of one byte cost no more than the bytes of one."""
        if not self._parts:
            return
        body = b"".join(self._parts)
        self._parts.clear()
        self._arrived += len(body)
        self._missing = max(self._missing - len(body), 0)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._hand_on()
        self._body_since = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._proceed()

    def _linger(self) -> bool:
        """At the connection's close: whether its client may still send, and is read on, for one window."""
        body = self._body_since is not None
        if not body and not self._head_begun and not self._rest:
            return False
        left = min(body and self._missing or LINGER_BYTES, LINGER_BYTES) - len(self._rest)
        if left <= 0:
            return False
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # what it waits for does not come
            self.cycle.message_event.set()
        now = self.loop.time()
        self._lingering = Lingering(self._counted.end, left, now + self.limits.window_seconds, now)
        self._rest, self.flow.held = b"", False
        self.flow.resume_reading()
        return True

    def sweep(self, now: float) -> None:
        """Ends the connection when it has waited too long for its client."""
        if self._lingering is not None:
            self._lingering.sweep(now)
        if self.transport.is_closing() or self.flow.write_paused or self._waiting:
            self._sweep_unsent(now)
            return
        self._unsent_since = None
        if self._body_since is not None:
            self._sweep_body(now - self._body_since)
        elif self._head_since is not None:
            if self._rest or (self.cycle is not None and not self.cycle.response_complete):
                self._head_since = now  # it waits for its turn, or for the reply before it
            elif now - self._head_since >= self.limits.head_seconds:
                self._end_head()

    def _sweep_unsent(self, now: float) -> None:
        if self._unsent_since is not None:
            if now - self._unsent_since < self.limits.window_seconds:
                return
            if self.taken - self._taken < self.limits.min_bytes:
                self.transport.abort()
        self._unsent_since, self._taken = now, self.taken

    def _sweep_body(self, seconds: float) -> None:
        if self.loop.time() - self._body_begun >= self.limits.body_seconds:
            self._tell(RequestTimeout(f"the request's body takes more than {self.limits.body_seconds:g} s"))
        if seconds < self.limits.window_seconds:
            return
        late = self._arrived < self.limits.min_bytes and not self.flow.read_paused and not self._rest
        if late or self.cycle.response_complete:
            self._tell(RequestTimeout("the request's body comes too slowly"))
        self._body_since, self._arrived = self.loop.time(), 0

    def _end_head(self) -> None:
        if self._head_begun:
            self._tell(RequestTimeout("the request's headers come too slowly"))
        else:
            self.transport.close()

    def _tell(self, error: RequestError) -> None:
        """Replies with the error, unless a reply has begun, and closes: after a timeout at once."""
        cycle = self.cycle
        if cycle is None or self._head_begun or not cycle.response_started:
            self._write_error(error)
        if isinstance(error, RequestTimeout):
            self._counted.end()
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is refused as all else is; nothing is written into a reply that has begun."""
        cycle = self.cycle
        if cycle is None or not cycle.response_started or cycle.response_complete:
            self._write_error(InvalidRequest("this is no request of HTTP/1.1: use a client that speaks it"))
        self.transport.close()

    def _write_error(self, error: RequestError) -> None:
        self.transport.write(closing_reply(error))


class Busy:
    """An ASGI application that answers 503 to everything but the probes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        body = error_json(BUSY, scope["path"])
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"retry-after", b"5"),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": BUSY.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


class Sweeper:
    """A periodic check of all connections of one server, which is cheaper than a timer for each."""

    def __init__(self, state: ServerState, limits: ConnectionLimits) -> None:
        self._state = state
        self._limits = limits

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._limits.sweep_seconds)
            now = loop.time()
            for connection in list(self._state.connections):
                if isinstance(connection, LimitedConnection):
                    connection.sweep(now)


def connection_class(
    limits: ConnectionLimits, places: ConnectionPlaces, turns: LoopTurns
) -> type[LimitedConnection]:
    """The protocol class for uvicorn, which makes the objects itself."""
    given = {"limits": limits, "places": places, "turns": turns}
    return type("ConfiguredConnection", (LimitedConnection,), given)

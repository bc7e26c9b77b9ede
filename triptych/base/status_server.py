"""The HTTP server of --metrics-port, in threads of its own: an event loop that hangs cannot silence it."""

from __future__ import annotations

import contextlib
import enum
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import HTTPServer
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, MetricsHandler

from triptych.base.rpc.ports import refused_port


class ServicePhase(enum.Enum):
    """How far a process has come between its start and its end."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """The reply to a probe: the HTTP status, and what its JSON body says."""

    status: int
    text: str
    degraded: tuple[str, ...] = ()


def health_answer(*, healthy: bool) -> ProbeAnswer:
    """The answer to a liveness probe: 503 only where a restart helps, never because of a store or a peer."""
    return ProbeAnswer(200, "ok") if healthy else ProbeAnswer(503, "stalled")


def ready_answer(
    phase: ServicePhase, *, healthy: bool, cut_off: bool = False, degraded: Sequence[str] = ()
) -> ProbeAnswer:
    """The answer to a readiness probe. A degraded process does part of its work, and stays ready."""
    if phase is not ServicePhase.READY:
        return ProbeAnswer(503, phase.value)
    if not healthy:
        return ProbeAnswer(503, "stalled")
    if cut_off:
        return ProbeAnswer(503, "cut off from the store")
    return ProbeAnswer(200, phase.value, tuple(degraded))


class ServiceStatus:
    """The state of one process: its phase, whether its engines and event loop are well, what it lacks.

    A process that drains never becomes ready again.
    """

    def __init__(self) -> None:
        self._phase = ServicePhase.STARTING
        self._healthy: Callable[[], bool] = lambda: True
        self._degraded: Callable[[], Sequence[str]] = tuple
        #: Whether others, not this process, reach what all need.
        self.cut_off: Callable[[], bool] = lambda: False

    def follow(self, healthy: Callable[[], bool], degraded: Callable[[], Sequence[str]] = tuple) -> None:
        """From now on asks these two, which may be called from any thread."""
        self._healthy, self._degraded = healthy, degraded

    def ready(self) -> None:
        """All that is needed to serve has been loaded."""
        if self._phase is ServicePhase.STARTING:
            self._phase = ServicePhase.READY

    def drain(self) -> None:
        """New work should go elsewhere from now on."""
        self._phase = ServicePhase.DRAINING

    def health_probe(self) -> ProbeAnswer:
        return health_answer(healthy=self._healthy())

    def ready_probe(self) -> ProbeAnswer:
        return ready_answer(
            self._phase, healthy=self._healthy(), cut_off=self.cut_off(), degraded=self._degraded()
        )


#: Open connections; one more closes the oldest, so that clients that never finish cannot lock a probe out.
MAX_CONNECTIONS = 32
#: Seconds for which a connection may neither send nor take anything.
IDLE_SECONDS = 10.0


class StatusServer(socketserver.ThreadingMixIn, HTTPServer):
    """An HTTP server of /health and /ready from a `ServiceStatus`, of /metrics from `registry`, and of
    /metrics/engine where the process is in front of an engine.

    A connection serves one request.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, status: ServiceStatus) -> None:
        self.status = status
        #: Empty until the process has loaded what it measures.
        self.registry = CollectorRegistry()
        #: The metrics of an engine that is another server, for /metrics/engine; called from any thread.
        self.engine_metrics: Callable[[], bytes] | None = None
        self._open: dict[int, socket.socket] = {}
        self._guard = threading.Lock()
        self.address_family = _family(host, port)
        super().__init__((host, port), _StatusHandler)

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the DNS for this host's name and waits for the answer.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = self._open.pop(next(iter(self._open)))
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[id(request)] = request
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._open.pop(id(request), None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle of a reply is no error of ours."""


class _StatusHandler(MetricsHandler):
    """One request for a page."""

    server: StatusServer
    timeout = IDLE_SECONDS
    server_version = "triptych"
    sys_version = ""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/metrics":
            self.registry = self.server.registry
            # The client library's OpenMetrics has `vllm_` in place of `vllm:`.
            del self.headers["Accept"]
            self.headers["Accept"] = "text/plain;version=0.0.4"
            super().do_GET()
        elif path == "/metrics/engine" and self.server.engine_metrics is not None:
            self._send_engine_metrics(self.server.engine_metrics)
        elif path == "/health":
            self._send(self.server.status.health_probe())
        elif path == "/ready":
            self._send(self.server.status.ready_probe())
        else:
            self._send(ProbeAnswer(404, "there is /metrics, /health and /ready"))

    def _send_engine_metrics(self, read: Callable[[], bytes]) -> None:
        try:
            self._reply(200, "text/plain; version=0.0.4; charset=utf-8", read())
        except Exception:  # whatever goes wrong on the way to another server
            self._send(ProbeAnswer(503, "the engine does not answer"))

    def _send(self, answer: ProbeAnswer) -> None:
        shown: dict[str, object] = {"status": answer.text}
        if answer.degraded:
            shown["degraded"] = list(answer.degraded)
        self._reply(answer.status, "application/json", json.dumps(shown).encode())

    def _reply(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def status_server(host: str, port: int, status: ServiceStatus) -> Iterator[StatusServer]:
    """A running server on `port`, 0 for a free one. ConfigError when it cannot be bound."""
    try:
        server = StatusServer(host, port, status)
    except OSError as error:
        raise refused_port(host, port, "--metrics-port", error.strerror or str(error)) from error
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="status", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def _family(host: str, port: int) -> socket.AddressFamily:
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return addresses[0][0]

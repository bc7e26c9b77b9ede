"""An OTLP/HTTP collector on loopback: keeps the spans that processes send to it."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Received:
    """One span as it came over the wire; ids in hex, times in seconds."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    start: float
    end: float
    state: str
    failed: bool
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]
    events: tuple[str, ...]


@dataclass
class Collector:
    """What has come so far. With `status` other than 200 everything is refused."""

    url: str = ""
    status: int = 200
    paths: list[str] = field(default_factory=list)
    _spans: list[Received] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, path: str, body: bytes) -> None:
        message = ExportTraceServiceRequest.FromString(body)
        spans = [
            _received(span, {a.key: _value(a.value) for a in of.resource.attributes})
            for of in message.resource_spans
            for scope in of.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self.paths.append(path)
            self._spans += spans

    def spans(self, trace_id: str = "") -> list[Received]:
        """All spans, or those of one trace, by their beginning."""
        with self._lock:
            found = [span for span in self._spans if trace_id in ("", span.trace_id)]
        return sorted(found, key=lambda span: span.start)

    def traces(self) -> dict[str, list[Received]]:
        traces: dict[str, list[Received]] = {}
        for span in self.spans():
            traces.setdefault(span.trace_id, []).append(span)
        return traces


@contextlib.contextmanager
def running_collector(port: int = 0) -> Iterator[Collector]:
    """A collector for the length of a `with`."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if collector.status == 200:
                collector.take(self.path, body)
            self.send_response(collector.status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


def _received(span: Any, resource: dict[str, Any]) -> Received:
    return Received(
        service=resource["service.name"],
        instance=resource["service.instance.id"],
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=type(span).SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        start=span.start_time_unix_nano / 1e9,
        end=span.end_time_unix_nano / 1e9,
        state=span.trace_state,
        failed=span.status.code == 2,
        attributes={a.key: _value(a.value) for a in span.attributes},
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        events=tuple(event.name for event in span.events),
    )

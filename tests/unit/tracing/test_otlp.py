"""Export of spans, and how tracing starts."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import logging
import math
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, TraceFlags

from support.processes.cluster import free_port
from support.tracing.collector import running_collector
from support.tracing.spans import new_context
from triptych.base.config import EncoderConfig, PDConfig, ProxyConfig
from triptych.base.errors import ConfigError
from triptych.base.tracing import otlp
from triptych.base.tracing.context import hex_trace_id, metadata
from triptych.base.tracing.otlp import SpanQueue, WarningExporter
from triptych.base.tracing.start import check_tracing, start_tracer, traces_url
from triptych.base.tracing.tracer import SpanKind, Tracer

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def started(url: str) -> Tracer:
    return start_tracer(ProxyConfig(otlp_endpoint=url), "proxy", "i-1")  # type: ignore[return-value]


def one_stage(tracer: Tracer) -> None:
    tracer.stage("s", new_context(sampled=True), 1.0, 1.0)


def test_a_span_arrives_as_it_was_recorded() -> None:
    parent = new_context(sampled=True, trace_id=TRACE, span_id=SPAN, state="a=1,b=2")
    link = new_context(sampled=True)
    attributes = {"text": "x", "count": 3, "part": 0.5, "yes": True, "list": ("a", "b")}
    with running_collector() as collector:
        tracer = started(collector.url)
        now = tracer.clock()
        span = tracer.start("chat", parent, attributes, kind=SpanKind.SERVER, at=now - 2.0, links=(link,))
        tracer.note(span, "e", now)
        tracer.end(span, now, "bad")
        tracer.close()
        tracer.close()
    [came] = collector.spans()
    assert collector.paths == ["/v1/traces"]
    assert (came.service, came.instance, came.name, came.kind) == ("triptych-proxy", "i-1", "chat", "SERVER")
    assert (came.trace_id, came.parent_id) == (TRACE, SPAN)
    assert int(came.span_id, 16) == span.get_span_context().span_id
    assert came.state == "a=1,b=2"
    assert came.failed
    assert came.attributes == {**attributes, "list": ["a", "b"]}
    assert came.links == ((hex_trace_id(link), f"{link.span_id:016x}"),)
    assert came.events == ("e",)
    assert came.end - came.start == pytest.approx(2.0, abs=1e-3)
    assert abs(came.end - time.time()) < 60.0


def test_a_collector_that_is_down_keeps_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    tracer = started(f"http://127.0.0.1:{free_port()}")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            one_stage(tracer)
        tracer.close()
    assert [record.name for record in caplog.records] == ["triptych.base.tracing.otlp"]
    assert "3 spans of traces are lost" in caplog.text


def test_a_disabled_sdk_records_nothing_and_sends_no_context_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    tracer = started(f"http://127.0.0.1:{free_port()}")
    span = tracer.start("s", None)
    assert not span.is_recording()
    assert metadata(span.get_span_context()) == ()
    tracer.end(span)
    tracer.close()


class Inner(SpanExporter):
    """An exporter with one result, and the sizes of the batches that it got."""

    def __init__(self, result: SpanExportResult | Exception) -> None:
        self.result = result
        self.sizes: list[int] = []
        self.stopped = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.sizes.append(len(spans))
        if isinstance(self.result, Exception):
            raise self.result
        logging.getLogger("opentelemetry.exporter.x").warning("connection refused")
        return self.result

    def shutdown(self) -> None:
        self.stopped = True


def a_span() -> ReadableSpan:
    return ReadableSpan("s", SpanContext(1, 1, False, TraceFlags(TraceFlags.SAMPLED)))


def test_failures_are_one_warning_a_minute_with_what_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    clock = [1000.0]
    exporter = WarningExporter(Inner(SpanExportResult.FAILURE), lambda: clock[0])
    for second in range(130):
        clock[0] = 1000.0 + second
        exporter.expect()
        exporter.export([a_span()])
    warnings = [record.getMessage() for record in caplog.records]
    assert [text.split()[0] for text in warnings] == ["1", "60", "60"]
    assert all("connection refused" in text and "--otlp-endpoint" in text for text in warnings)


def test_closing_waits_for_a_collector_that_hangs_no_longer_than_its_time(monkeypatch):
    monkeypatch.setattr(otlp, "CLOSING_SECONDS", 0.05)
    hang = threading.Event()
    inner = Inner(SpanExportResult.SUCCESS)
    monkeypatch.setattr(inner, "export", lambda spans: hang.wait() and inner.result)
    queue = SpanQueue(WarningExporter(inner))
    queue.on_end(a_span())
    queue.close()
    queue.close()
    assert not hang.is_set()
    assert inner.stopped
    hang.set()


def test_an_exporter_that_raises_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    inner = Inner(RuntimeError("broken"))
    queue = SpanQueue(WarningExporter(inner))
    queue.on_end(a_span())
    queue.force_flush()
    inner.result = SpanExportResult.SUCCESS
    queue.on_end(a_span())
    queue.close()
    assert inner.sizes == [1, 1]
    assert "broken" in caplog.text


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://otel.example/team/v1/traces", "https://otel.example/team/v1/traces"),
        ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
    ],
)
def test_an_address_without_a_path_gets_otlps(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


@pytest.mark.parametrize(
    "endpoint",
    [
        "127.0.0.1:4318",
        "grpc://x:4317",
        "http://",
        "http://x:port",
        "http://x?key=1",
        "http://x:99999",
        "file:///x",
    ],
)
def test_what_is_no_otlp_address_is_refused_by_the_flags_name(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint.*http://host:4318"):
        traces_url(endpoint)


def test_a_password_in_the_address_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        traces_url("http://me:hunter2@host:4318")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("sample", [-0.1, 1.1, math.nan, math.inf])
def test_a_part_outside_of_0_to_1_is_refused(sample: float) -> None:
    with pytest.raises(ConfigError, match="--trace-sample"):
        check_tracing(ProxyConfig(trace_sample=sample))


@pytest.mark.parametrize("config", [ProxyConfig(), EncoderConfig(), PDConfig()])
def test_there_is_no_tracer_without_an_endpoint(config: ProxyConfig | EncoderConfig | PDConfig) -> None:
    check_tracing(config)
    assert start_tracer(config, "proxy", "1") is None


def test_missing_packages_are_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name.startswith("opentelemetry") else found(name)
    )
    config = dataclasses.replace(ProxyConfig(), otlp_endpoint="http://127.0.0.1:4318")
    with pytest.raises(ConfigError, match=r"pip install 'triptych\[otel\]'"):
        check_tracing(config)


PROGRAM = """
import sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("opentelemetry"):
            frame = sys._getframe(1)
            while "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            importers.add(frame.f_globals.get("__name__", ""))
        return None

importers = set()
sys.meta_path.insert(0, Watch())
import triptych.proxy.service, triptych.registry.worker_server
from triptych.base.config import ServiceConfig
from triptych.base.tracing.start import check_tracing, start_tracer
check_tracing(ServiceConfig())
assert start_tracer(ServiceConfig(), "proxy", "1") is None
print([name for name in importers if name.startswith("triptych")])
ours = ("triptych.base.tracing.otlp", "triptych.base.tracing.otlp")
exporters = ("opentelemetry.sdk.trace", "opentelemetry.exporter", *ours)
print([name for name in sys.modules if name.startswith(exporters)])
"""


def test_of_opentelemetry_only_the_api_is_imported_while_traces_are_off() -> None:
    """By us: redis-py imports its metrics where they happen to be installed.

    Workers import it by the same modules only, which a contract of lint-imports holds.
    """
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=55,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    importers, exporting = (ast.literal_eval(line) for line in done.stdout.splitlines())
    assert importers and all(name.startswith("triptych.base.tracing.") for name in importers)
    assert exporting == []

"""The exporter against a real collector on loopback."""

from __future__ import annotations

import logging
import time

import pytest

from support.processes.cluster import free_port
from support.tracing.collector import running_collector
from triptych.config import ProxyConfig
from triptych.tracing.context import SpanContext, new_context
from triptych.tracing.otlp import OtlpSender
from triptych.tracing.span import Event, FinishedSpan, SpanKind
from triptych.tracing.start import start_tracer

RESOURCE = {"service.name": "triptych-proxy", "service.instance.id": "i-1"}


def test_a_span_arrives_as_it_was_recorded() -> None:
    parent = SpanContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", True, "a=1,b=2")
    link = new_context(sampled=True)
    now = time.monotonic()
    attributes = {"text": "x", "count": 3, "part": 0.5, "yes": True, "list": ("a", "b")}
    span = FinishedSpan(
        "chat demo",
        parent.child(),
        parent,
        now - 2.0,
        now,
        attributes,
        SpanKind.SERVER,
        (link,),
        (Event("e", now),),
        "bad",
    )
    with running_collector() as collector:
        sender = OtlpSender(f"{collector.url}/v1/traces", RESOURCE, "1.2")
        assert sender.send([span]) == ""
        sender.stop()
    [came] = collector.spans()
    assert collector.paths == ["/v1/traces"]
    assert (came.service, came.instance, came.name, came.kind) == (
        "triptych-proxy",
        "i-1",
        "chat demo",
        "SERVER",
    )
    assert (came.trace_id, came.span_id, came.parent_id) == (
        parent.trace_id,
        span.context.span_id,
        parent.span_id,
    )
    assert came.state == "a=1,b=2"
    assert came.failed
    assert came.attributes == {**attributes, "list": ["a", "b"]}
    assert came.links == ((link.trace_id, link.span_id),)
    assert came.events == ("e",)
    assert came.end - came.start == pytest.approx(2.0, abs=1e-3)
    assert abs(came.end - time.time()) < 60.0


def test_a_refusal_says_why_and_logs_nothing_itself(caplog: pytest.LogCaptureFixture) -> None:
    with running_collector() as collector, caplog.at_level(logging.DEBUG):
        collector.status = 400
        sender = OtlpSender(f"{collector.url}/v1/traces", RESOURCE, "1.2")
        reason = sender.send([FinishedSpan("s", new_context(sampled=True), None, 1.0, 2.0, {})])
        sender.stop()
    assert "400" in reason
    assert [r for r in caplog.records if r.name.startswith(("opentelemetry", "triptych"))] == []


def test_a_collector_that_is_down_keeps_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    config = ProxyConfig(otlp_endpoint=f"http://127.0.0.1:{free_port()}")
    tracer = start_tracer(config, "proxy", "i-1")
    assert tracer is not None
    context = tracer.enter(None)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            tracer.stage("s", context, 1.0, 1.0)
        tracer.close()
    assert [record.name for record in caplog.records] == ["triptych.tracing.span_queue"]
    assert "3 spans of traces are lost" in caplog.text


def test_a_service_names_itself_and_its_process() -> None:
    with running_collector() as collector:
        tracer = start_tracer(ProxyConfig(otlp_endpoint=collector.url), "proxy", "proxy-1")
        assert tracer is not None
        tracer.stage("s", tracer.enter(None), 1.0, 1.0)
        tracer.close()
    assert [(span.service, span.instance) for span in collector.spans()] == [("triptych-proxy", "proxy-1")]

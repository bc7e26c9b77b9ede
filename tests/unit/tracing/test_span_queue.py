from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import pytest

from triptych.tracing.context import new_context
from triptych.tracing.span import FinishedSpan
from triptych.tracing.span_queue import BATCH_SPANS, SpanQueue

NEVER = 3600.0


def a_span(name: str = "s") -> FinishedSpan:
    return FinishedSpan(name, new_context(sampled=True), None, 1.0, 2.0, {})


class Collecting:
    """A `send` that keeps names; while `gate` is closed it waits, as a collector that hangs."""

    def __init__(self, reason: str = "") -> None:
        self.names: list[str] = []
        self.reason = reason
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.stopped = False

    def send(self, spans: Sequence[FinishedSpan]) -> str:
        self.begun.set()
        self.gate.wait(30)
        self.names += [span.name for span in spans]
        return self.reason

    def stop(self) -> None:
        self.stopped = True
        self.gate.set()


def test_what_is_left_is_sent_when_the_queue_is_closed() -> None:
    collecting = Collecting()
    queue = SpanQueue(collecting.send, collecting.stop, batch_seconds=NEVER)
    for number in range(3):
        queue.add(a_span(str(number)))
    queue.close()
    assert collecting.names == ["0", "1", "2"]
    assert collecting.stopped


def test_a_full_batch_is_sent_at_once() -> None:
    collecting = Collecting()
    queue = SpanQueue(collecting.send, collecting.stop, batch_seconds=NEVER)
    for _ in range(BATCH_SPANS):
        queue.add(a_span())
    assert collecting.begun.wait(30)
    queue.close()
    assert len(collecting.names) == BATCH_SPANS


def test_a_collector_that_hangs_costs_the_oldest_spans_and_nobody_waits() -> None:
    collecting = Collecting()
    collecting.gate.clear()
    queue = SpanQueue(collecting.send, collecting.stop, most=4, batch_seconds=0.001, closing_seconds=0.05)
    queue.add(a_span("first"))
    assert collecting.begun.wait(30)
    for number in range(100):
        queue.add(a_span(str(number)))
    queue.close()
    assert collecting.stopped
    assert set(collecting.names) <= {"first", "96", "97", "98", "99"}


def test_closing_waits_for_a_hanging_collector_no_longer_than_its_time() -> None:
    """`stop` does not help here: the process ends all the same."""
    hang = threading.Event()
    queue = SpanQueue(
        lambda _: "" if hang.wait(30) else "", lambda: None, batch_seconds=0.001, closing_seconds=0.05
    )
    queue.add(a_span())
    queue.close()
    hang.set()
    queue.close()


def test_failures_are_one_warning_a_minute_with_what_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    clock = [1000.0]
    collecting = Collecting("connection refused")
    queue = SpanQueue(collecting.send, collecting.stop, batch_seconds=NEVER, clock=lambda: clock[0])
    with caplog.at_level(logging.WARNING):
        for second in range(130):
            clock[0] = 1000.0 + second
            queue.add(a_span())
            queue._send_all()
    queue.close()
    warnings = [record.getMessage() for record in caplog.records]
    assert [text.split()[0] for text in warnings] == ["1", "60", "60"]
    assert all("connection refused" in text and "--otlp-endpoint" in text for text in warnings)


def test_an_exporter_that_raises_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    taken: list[int] = []

    def send(spans: Sequence[FinishedSpan]) -> str:
        taken.append(len(spans))
        if len(taken) == 1:
            raise RuntimeError("broken")
        return ""

    queue = SpanQueue(send, lambda: None, batch_seconds=NEVER)
    queue.add(a_span())
    queue._send_all()
    queue.add(a_span())
    queue.close()
    assert taken == [1, 1]
    assert "broken" in caplog.text

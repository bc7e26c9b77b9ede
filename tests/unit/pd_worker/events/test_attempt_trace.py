"""Spans of an attempt in a PD worker, from the events of its engine."""

from __future__ import annotations

from typing import Any

import pytest

from support.tracing.spans import KeptSpans, TickingClock, kept_tracer, new_context
from triptych.base.delta import Delta
from triptych.base.errors import InternalError
from triptych.base.tracing.context import Producers, hex_trace_id, metadata, to_bytes
from triptych.base.tracing.tracer import SpanKind
from triptych.pd_worker.events.attempt_trace import AttemptTrace, PDTraces
from triptych.pd_worker.events.streams import EventStreams
from triptych.protos import pd_pb2
from triptych.protos.convert import error_to_proto
from triptych.protos.pd_pb2 import Admitted, Finished, ItemLoaded, ItemMissing, RequestEvent

KEY = "ab" * 32
PARENT = new_context(sampled=True, state="a=1")
TRACEPARENT, TRACESTATE = (value for _, value in metadata(PARENT))
NAMES: dict[str, Any] = {"request_id": "r1", "attempt": 1, "proxy_id": "p1"}
#: An event that the streams fail on, and say so.
UNSENDABLE = Delta("x", ("no number",), **NAMES)  # type: ignore[arg-type]


class Box:
    """One PD worker's streams with traces, on a clock of their own."""

    def __init__(self, ratio: float = 1.0) -> None:
        self.clock = TickingClock()
        tracer, self.kept = kept_tracer(ratio, clock=self.clock)
        self.kept: KeptSpans
        self.producers = Producers()
        self.traces = PDTraces(tracer, self.producers)
        self.streams = EventStreams(lambda ids, proxy: None, self.clock)

    def submit(self, traceparent: str = TRACEPARENT, state: str = TRACESTATE) -> AttemptTrace | None:
        message = pd_pb2.SubmitRequest(
            request_id="r1", attempt=1, proxy_id="p1", traceparent=traceparent, tracestate=state
        )
        trace = self.traces.begin(message)
        self.streams.open("p1", "r1", 1, trace=trace)
        return trace

    def at(self, now: float, *events: object) -> None:
        self.clock.now = now
        self.streams.deliver(events)  # type: ignore[arg-type]


@pytest.fixture
async def box() -> Box:
    return Box()


def admitted() -> RequestEvent:
    return RequestEvent(admitted=Admitted(prompt_token_ids=(1, 2, 3)), **NAMES)


def loaded(seconds: float) -> RequestEvent:
    return RequestEvent(item_loaded=ItemLoaded(mm_hash=KEY, seconds=seconds), **NAMES)


def missing(digest: str = "") -> RequestEvent:
    return RequestEvent(item_missing=ItemMissing(mm_hash=KEY, damaged_digest=digest), **NAMES)


def finished(error: InternalError | None = None) -> RequestEvent:
    end = Finished(reason="error" if error else "stop", error=error_to_proto(error) if error else None)
    end.prompt_tokens, end.completion_tokens, end.cached_tokens = 20, 7, 16
    end.queue_seconds, end.load_seconds, end.prefill_seconds, end.decode_seconds = 1.0, 2.0, 0.5, 3.0
    return RequestEvent(finished=end, **NAMES)


async def test_the_stages_of_an_attempt_are_where_its_timings_say(box: Box) -> None:
    box.submit()
    box.at(100.25, admitted())
    box.at(102.0, loaded(0.5))
    box.at(103.0, *(Delta("x", (n,), **NAMES) for n in range(7)))
    box.at(105.0, finished())
    root = box.kept.one("PD request")
    assert (root.kind, root.parent, root.start, root.end) == (SpanKind.SERVER, PARENT, 100.0, 105.0)
    assert (root.context.trace_id, root.context.trace_state) == (PARENT.trace_id, PARENT.trace_state)
    stages = {s.name: (s.start, s.end) for s in box.kept.spans if s.parent == root.context}
    assert stages == {
        "queue": (100.0, 101.0),
        "wait for items": (100.25, 102.25),
        "load item": (101.5, 102.0),
        "prefill": (101.0, 101.5),
        "decode": (101.5, 104.5),
    }
    assert root.attributes["gen_ai.usage.input_tokens"] == 20
    assert root.attributes["gen_ai.usage.cache_read.input_tokens"] == 16
    assert root.attributes["gen_ai.usage.output_tokens"] == 7
    assert root.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert root.events == ("admitted",)


@pytest.mark.parametrize(("seconds", "source"), [(0.5, "store"), (0.0, "resident")])
async def test_a_reader_is_linked_to_the_span_that_computed_the_item(box, seconds, source):
    producer = new_context(sampled=True)
    box.producers.note(KEY, to_bytes(producer))
    box.submit()
    box.at(101.0, loaded(seconds))
    box.at(102.0, finished())
    load = box.kept.one("load item")
    assert load.links == (producer,)
    assert load.attributes == {"triptych.item.mm_hash": KEY[:12], "triptych.item.source": source}


async def test_a_load_that_began_for_another_request_counts_from_this_ones_arrival(box: Box) -> None:
    box.submit()
    box.at(101.0, loaded(30.0), finished())
    assert box.kept.one("load item").start == 100.0


async def test_a_lost_item_is_an_event_of_the_attempt(box: Box) -> None:
    box.submit()
    box.at(101.0, missing())
    box.at(102.0, missing("0" * 40), finished())
    assert box.kept.one("PD request").events == ("item missing", "item damaged")


async def test_an_attempt_that_fails_has_its_errors_code(box: Box) -> None:
    box.submit()
    box.at(101.0, finished(InternalError("secret details")))
    assert box.kept.one("PD request").error == InternalError.code
    assert "secret" not in repr(box.kept.spans)


async def test_a_cancelled_attempt_ends_its_span_once(box: Box) -> None:
    box.submit()
    box.streams.cancel("p1", ["r1"])
    box.streams.cancel("p1", ["r1"])
    assert box.kept.one("PD request").error == "cancelled"


async def test_a_finished_attempt_is_not_cancelled_when_it_is_forgotten(box: Box) -> None:
    box.submit()
    box.at(101.0, finished())
    box.streams.cancel("p1", ["r1"])
    assert [span.error for span in box.kept.all("PD request")] == [""]


@pytest.mark.parametrize("parent", ["", "nonsense", "00-" + "0" * 32 + "-b7ad6b7169203331-01", "x" * 100_000])
async def test_a_context_that_is_not_valid_begins_a_trace_of_its_own(box: Box, parent: str) -> None:
    box.submit(parent, "===")
    box.at(101.0, finished())
    root = box.kept.one("PD request")
    assert root.parent is None
    assert not root.context.trace_state


async def test_a_request_that_the_proxy_does_not_record_has_no_trace(box: Box) -> None:
    unrecorded = TRACEPARENT[:-2] + "00"
    assert box.submit(unrecorded) is None
    box.at(101.0, admitted(), finished())
    assert box.kept.spans == []


async def test_requests_of_a_proxy_without_traces_are_sampled_here() -> None:
    assert Box(0.6).submit("", "") is not None
    assert Box(0.4).submit("", "") is None


async def test_log_records_about_an_attempt_have_its_trace_where_it_is_recorded(box, caplog):
    box.submit()
    box.at(1.0, UNSENDABLE)
    [record] = caplog.records
    assert (record.request_id, record.trace_id) == ("r1", hex_trace_id(PARENT))  # type: ignore[attr-defined]


async def test_log_records_about_an_attempt_that_is_not_recorded_have_no_trace(caplog):
    box = Box(ratio=0.0)
    box.submit()
    box.at(1.0, UNSENDABLE)
    [record] = caplog.records
    assert record.request_id == "r1" and not hasattr(record, "trace_id")  # type: ignore[attr-defined]

"""Trace contexts and the attributes of spans."""

from __future__ import annotations

import pytest

from support.tracing.spans import TickingClock, kept_tracer, new_context
from triptych.base.tracing import attributes as names
from triptych.base.tracing.context import (
    CONTEXT_BYTES,
    Producers,
    context_of,
    from_bytes,
    hex_trace_id,
    metadata,
    parse_traceparent,
    to_bytes,
)
from triptych.base.tracing.server_span import ServerSpan
from triptych.base.tracing.tracer import SpanKind, Tracer
from triptych.base.types import OutputFormat, SamplingParams

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
CONTEXT = new_context(sampled=True, trace_id=TRACE, span_id=SPAN)
WITH_STATE = new_context(sampled=True, trace_id=TRACE, span_id=SPAN, state="a=1,b=2")


def test_a_valid_traceparent_is_read_and_written_alike() -> None:
    context = parse_traceparent(PARENT, "a=1,b=2")
    assert context == WITH_STATE
    assert metadata(context) == (("traceparent", PARENT), ("tracestate", "a=1,b=2"))
    assert hex_trace_id(context) == TRACE


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("ff", True)])
def test_only_the_lowest_flag_says_sampled(flags: str, sampled: bool) -> None:
    context = parse_traceparent(f"00-{TRACE}-{SPAN}-{flags}")
    assert context.trace_flags.sampled is sampled


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01-extra",
        f"00-{TRACE}-{SPAN}-01-",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-0g",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"0-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"00-{TRACE}-{SPAN}-01\x00",
        f"00-{'٠' * 32}-{SPAN}-01",
        f"01-{TRACE}-{SPAN}-01" + "x",
        f"01-{TRACE}-{SPAN}-01-" + "x" * 4096,
    ],
)
def test_a_traceparent_that_is_not_valid_counts_as_none(parent: str) -> None:
    assert parse_traceparent(parent, "congo=t61rcWkgMzE") is None


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        ("rojo=00f067aa0ba902b7,congo=t61rcWkgMzE", "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"),
        (" rojo=1 ,\t, congo=2 ", "rojo=1,congo=2"),
        ("fw529a3039@dt=FfAAAA", "fw529a3039@dt=FfAAAA"),
        ("", ""),
        ("Rojo=1", ""),
        ("rojo", ""),
        ("rojo=", ""),
        ("rojo=1,rojo=2", ""),
        ("rojo=a=b", ""),
        ("rojo=\u00e9", ""),
        ("rojo=1\r\nx-evil: 1", ""),
        (",".join(f"k{n}=1" for n in range(32)), ",".join(f"k{n}=1" for n in range(32))),
        (",".join(f"k{n}=1" for n in range(33)), ""),
        ("k=" + "x" * 254, "k=" + "x" * 254),
        ("k=" + "x" * 600, ""),
    ],
)
def test_a_tracestate_is_kept_whole_or_dropped_whole(state: str, kept: str) -> None:
    context = parse_traceparent(PARENT, state)
    assert context.trace_state.to_header() == kept


def test_a_bad_tracestate_leaves_the_traceparent_valid() -> None:
    assert parse_traceparent(PARENT, "===") == CONTEXT


def test_headers_of_http_and_of_grpc_are_read_alike() -> None:
    http = [
        (b"host", b"x"),
        (b"traceparent", PARENT.encode()),
        (b"tracestate", b"a=1"),
        (b"tracestate", b"b=2"),
    ]
    grpc = [("user-agent", "x"), ("traceparent", PARENT), ("tracestate", "a=1,b=2"), ("x-bin", b"\xff")]
    assert context_of(http) == context_of(grpc) == WITH_STATE


@pytest.mark.parametrize("headers", [[], [("traceparent", PARENT)] * 2, [("traceparent", b"\xff\xfe")]])
def test_a_missing_or_doubled_or_binary_traceparent_counts_as_none(headers: list[tuple[str, str]]) -> None:
    assert context_of(headers) is None


def test_the_binary_form_carries_ids_and_flag() -> None:
    for sampled in (True, False):
        context = new_context(sampled=sampled)
        raw = to_bytes(context)
        assert len(raw) == CONTEXT_BYTES
        assert from_bytes(raw) == context


@pytest.mark.parametrize("raw", [b"", b"x", bytes(25), bytes(24), b"\x01" * 16 + bytes(9), b"\x01" * 26])
def test_other_bytes_are_no_context(raw: bytes) -> None:
    assert from_bytes(raw) is None


def test_what_a_caller_sends_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert parse_traceparent(PARENT, "a client's secret") == CONTEXT
    assert caplog.text == ""


def test_an_mm_hash_is_shortened() -> None:
    assert names.item("0123456789abcdef" * 4) == {"triptych.item.mm_hash": "0123456789ab"}


def test_only_parameters_that_the_client_set_are_named_and_none_that_holds_text() -> None:
    secret = SamplingParams(
        stop=("secret",), output_format=OutputFormat("regex", "secret"), logit_bias=((1, 2.0),), seed=7
    )
    assert names.sampling(secret, 1) == {}
    assert names.sampling(SamplingParams(top_p=0.9, frequency_penalty=0.5), 1) == {
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.frequency_penalty": 0.5,
    }


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:5000", {"server.address": "127.0.0.1", "server.port": 5000}),
        ("[::1]:5000", {"server.address": "::1", "server.port": 5000}),
        ("", {}),
        ("unix", {"server.address": "unix"}),
    ],
)
def test_a_workers_address_is_taken_apart(address: str, expected: dict[str, object]) -> None:
    assert names.server(address) == expected


def test_a_noted_producer_is_a_link_of_all_that_read_the_item() -> None:
    producers, context = Producers(), new_context(sampled=True)
    producers.note("a", to_bytes(context))
    assert producers.links("a") == (context,) == producers.links("a")
    assert producers.links("b") == ()


def test_a_value_without_a_producer_replaces_one_that_had_one() -> None:
    producers = Producers()
    producers.note("a", to_bytes(new_context(sampled=True)))
    producers.note("a", b"")
    assert producers.links("a") == ()
    assert producers.raw("a") == b""


def test_bytes_of_a_damaged_or_foreign_form_are_no_link() -> None:
    producers = Producers()
    producers.note("a", b"\xff" * 7)
    producers.note("b", bytes(25))
    assert producers.links("a") == producers.links("b") == ()


LOW_TRACE = "0" * 31 + "1"


def recorded(tracer: Tracer, flag: bool | None) -> bool:
    """Whether a request is recorded whose caller's flag is this; None: it has no caller."""
    parent = None if flag is None else new_context(sampled=flag, trace_id=LOW_TRACE)
    return tracer.start("request", parent).is_recording()


@pytest.mark.parametrize("draw", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("flag", [None, True, False])
@pytest.mark.parametrize("trusts", [True, False])
def test_a_ratio_of_zero_records_nothing_whatever_a_caller_says(flag, draw, trusts):
    assert recorded(kept_tracer(0.0, trusts_parent=trusts, draw=lambda: draw)[0], flag) is False


def test_a_trusted_callers_flag_decides() -> None:
    assert recorded(kept_tracer(0.001, draw=lambda: 0.999)[0], True) is True
    assert recorded(kept_tracer(1.0, draw=lambda: 0.0)[0], False) is False


@pytest.mark.parametrize(("draw", "expected"), [(0.0, True), (0.24, True), (0.25, False), (0.9, False)])
@pytest.mark.parametrize("flag", [True, False, None])
def test_a_client_that_is_not_trusted_has_no_say(flag: bool | None, draw: float, expected: bool) -> None:
    assert recorded(kept_tracer(0.25, trusts_parent=False, draw=lambda: draw)[0], flag) is expected


def test_a_hostile_client_cannot_have_all_its_requests_recorded() -> None:
    """Neither the flag nor a trace id that samplers by id would take."""
    draws = iter([0.05, 0.5, 0.9, 0.11] * 25)
    tracer, _ = kept_tracer(0.1, trusts_parent=False, draw=lambda: next(draws))
    assert sum(recorded(tracer, True) for _ in range(100)) == 25


def test_a_callers_trace_goes_on_though_it_is_not_recorded() -> None:
    tracer, kept = kept_tracer(0.1, trusts_parent=False)
    parent = new_context(sampled=True, trace_id=LOW_TRACE, state="a=1")
    context = tracer.start("request", parent).get_span_context()
    assert (context.trace_id, context.trace_state, context.trace_flags.sampled) == (
        parent.trace_id,
        parent.trace_state,
        False,
    )
    tracer.stage("unseen", context, 1.0, 1.0)
    assert kept.spans == []


@pytest.mark.parametrize("trusts", [True, False])
def test_spans_of_one_process_are_recorded_together(trusts: bool) -> None:
    draws = iter([0.05, 0.9])
    tracer, kept = kept_tracer(0.1, trusts_parent=trusts, draw=lambda: next(draws))
    for _ in range(2):
        tracer.stage("stage", tracer.start("request", None).get_span_context(), 1.0, 1.0)
    assert kept.names() == ["stage"]


OUTER = new_context(sampled=True, state="a=1")


def test_a_finished_request_says_what_the_conventions_ask() -> None:
    clock = TickingClock()
    tracer, kept = kept_tracer(clock=clock)
    span = ServerSpan(tracer, OUTER, "chat", {names.HTTP_METHOD: "POST"})
    span.serves("demo", names.sampling(SamplingParams(max_tokens=8, temperature=0.5, top_k=0), 2))
    span.first_token(100.5)
    span.first_token(102.0)
    span.count(20, 16, 5)
    span.count(10, 0, 2)
    span.finished("stop")
    span.finished("length")
    span.http_status(200)
    clock.now = 103.0
    span.end()
    [record] = kept.spans
    assert (record.name, record.kind, record.parent) == ("chat demo", SpanKind.SERVER, OUTER)
    assert (record.start, record.end, record.error) == (100.0, 103.0, "")
    assert record.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "triptych",
        "gen_ai.request.model": "demo",
        "gen_ai.response.model": "demo",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.time_to_first_chunk": 0.5,
        "gen_ai.usage.input_tokens": 30,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "http.request.method": "POST",
        "http.response.status_code": 200,
    }


def test_a_reply_that_breaks_off_after_its_200_is_an_error() -> None:
    tracer, kept = kept_tracer()
    span = ServerSpan(tracer, None, "chat", {})
    span.http_status(200)
    span.broken("client_closed")
    span.end()
    assert kept.one("chat").error == "client_closed"


def test_an_unsampled_request_has_a_context_and_no_span() -> None:
    tracer, kept = kept_tracer(0.1)
    span = ServerSpan(tracer, None, "chat", {})
    span.count(1, 0, 1)
    span.end()
    assert not span.recording
    assert not span.context.trace_flags.sampled
    assert kept.spans == []

"""Span contexts: W3C's headers in and out, and what a hostile caller may send."""

from __future__ import annotations

import pytest

from support.tracing.spans import new_context
from triptych.base.tracing.context import (
    CONTEXT_BYTES,
    context_of,
    from_bytes,
    hex_trace_id,
    metadata,
    parse_traceparent,
    to_bytes,
)

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
    assert context is not None
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
    assert context is not None
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

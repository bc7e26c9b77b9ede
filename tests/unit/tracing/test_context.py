"""Span contexts: W3C's headers in and out, and what a hostile caller may send."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.tracing.context import (
    CONTEXT_BYTES,
    SpanContext,
    context_of,
    new_context,
    parse_traceparent,
    parse_tracestate,
)

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


def test_a_valid_traceparent_is_read_and_written_alike() -> None:
    context = parse_traceparent(PARENT, "congo=t61rcWkgMzE")
    assert context == SpanContext(TRACE, SPAN, True, "congo=t61rcWkgMzE")
    assert context.traceparent == PARENT


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("ff", True)])
def test_only_the_lowest_flag_says_sampled(flags: str, sampled: bool) -> None:
    context = parse_traceparent(f"00-{TRACE}-{SPAN}-{flags}")
    assert context is not None
    assert context.sampled is sampled
    assert context.traceparent[-2:] == ("01" if sampled else "00")


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


def test_a_later_version_may_go_on_after_the_known_fields() -> None:
    context = parse_traceparent(f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like")
    assert context == SpanContext(TRACE, SPAN, True)
    assert context.traceparent == PARENT  # ours is version 00


@given(st.text(max_size=200))
def test_no_text_makes_the_parser_fail(text: str) -> None:
    context = parse_traceparent(text, text)
    assert context is None or len(context.traceparent) == 55


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
    assert parse_tracestate(state) == kept


def test_a_bad_tracestate_leaves_the_traceparent_valid() -> None:
    assert parse_traceparent(PARENT, "===") == SpanContext(TRACE, SPAN, True)


def test_headers_of_http_and_of_grpc_are_read_alike() -> None:
    http = [
        (b"host", b"x"),
        (b"traceparent", PARENT.encode()),
        (b"tracestate", b"a=1"),
        (b"tracestate", b"b=2"),
    ]
    grpc = [("user-agent", "x"), ("traceparent", PARENT), ("tracestate", "a=1,b=2"), ("x-bin", b"\xff")]
    assert context_of(http) == context_of(grpc) == SpanContext(TRACE, SPAN, True, "a=1,b=2")


@pytest.mark.parametrize("headers", [[], [("traceparent", PARENT)] * 2, [("traceparent", b"\xff\xfe")]])
def test_a_missing_or_doubled_or_binary_traceparent_counts_as_none(headers: list[tuple[str, str]]) -> None:
    assert context_of(headers) is None


def test_a_child_keeps_trace_flag_and_state_and_has_a_span_id_of_its_own() -> None:
    parent = SpanContext(TRACE, SPAN, True, "a=1")
    child = parent.child()
    assert (child.trace_id, child.sampled, child.state) == (TRACE, True, "a=1")
    assert child.span_id != SPAN and len(child.span_id) == 16


def test_the_binary_form_carries_ids_and_flag() -> None:
    for sampled in (True, False):
        context = new_context(sampled=sampled)
        raw = context.to_bytes()
        assert len(raw) == CONTEXT_BYTES
        assert SpanContext.from_bytes(raw) == context


@pytest.mark.parametrize("raw", [b"", b"x", bytes(25), bytes(24), b"\x01" * 16 + bytes(9), b"\x01" * 26])
def test_other_bytes_are_no_context(raw: bytes) -> None:
    assert SpanContext.from_bytes(raw) is None


def test_the_state_is_a_header_of_its_own() -> None:
    context = SpanContext(TRACE, SPAN, False)
    assert context.metadata() == (("traceparent", PARENT[:-1] + "0"),)
    with_state = SpanContext(TRACE, SPAN, True, "a=1")
    assert with_state.metadata() == (("traceparent", PARENT), ("tracestate", "a=1"))

"""Span context: what identifies a span between processes, and its W3C, metadata and binary forms."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
#: Bytes of a context without its state.
CONTEXT_BYTES = 25

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_LONGEST_PARENT = 128
#: What W3C asks to propagate at least, and the most list members that it allows.
_LONGEST_STATE = 512
_MOST_MEMBERS = 32
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_SAMPLED = 0x01
_STATE_KEY = r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
_STATE_VALUE = r"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_MEMBER = re.compile(f"({_STATE_KEY})={_STATE_VALUE}")


@dataclass(frozen=True, slots=True)
class SpanContext:
    """A span's identity: hex ids, whether its trace is sampled, and the tracing systems' own `state`."""

    trace_id: str
    span_id: str
    sampled: bool
    state: str = ""

    @property
    def traceparent(self) -> str:
        """W3C's header of version 00."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"

    def child(self) -> SpanContext:
        """The context of a new span of this trace."""
        return replace(self, span_id=new_span_id())

    def to_bytes(self) -> bytes:
        """The ids and flags, without the state."""
        flags = bytes([_SAMPLED if self.sampled else 0])
        return bytes.fromhex(self.trace_id) + bytes.fromhex(self.span_id) + flags

    @classmethod
    def from_bytes(cls, raw: bytes) -> SpanContext | None:
        """The context of `to_bytes`; None for other bytes."""
        if len(raw) != CONTEXT_BYTES:
            return None
        trace_id, span_id = raw[:16].hex(), raw[16:24].hex()
        if trace_id == _NO_TRACE or span_id == _NO_SPAN:
            return None
        return cls(trace_id, span_id, bool(raw[24] & _SAMPLED))

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The context as headers of a gRPC call."""
        parent = (TRACEPARENT, self.traceparent)
        return (parent, (TRACESTATE, self.state)) if self.state else (parent,)


def new_span_id() -> str:
    """A random id."""
    return secrets.token_hex(8)


def new_context(*, sampled: bool) -> SpanContext:
    """The context of a new trace's first span."""
    drawn = secrets.token_hex(24)  # once for both ids: requests that are not sampled pay for it, too
    return SpanContext(drawn[:32], drawn[32:], sampled)


def parse_traceparent(parent: str, state: str = "") -> SpanContext | None:
    """The caller's context; None for a traceparent that is not valid. An invalid state is dropped alone.

    A later version than 00 may go on after the fields that are known.
    """
    if len(parent) > _LONGEST_PARENT or (match := _TRACEPARENT.fullmatch(parent.strip(" \t"))) is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest is not None):
        return None
    if trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    return SpanContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), parse_tracestate(state))


def parse_tracestate(state: str) -> str:
    """The list in its shortest form; empty where it is not valid, too long, or has a key twice."""
    if not state or len(state) > _LONGEST_STATE:
        return ""
    members = [member for part in state.split(",") if (member := part.strip(" \t"))]
    matches = [_MEMBER.fullmatch(member) for member in members]
    keys = {match.group(1) for match in matches if match is not None}
    if len(keys) != len(members) or len(members) > _MOST_MEMBERS:
        return ""
    return ",".join(members)


def context_of(headers: Iterable[tuple[str | bytes, str | bytes]]) -> SpanContext | None:
    """The caller's context in HTTP headers or gRPC metadata, whose names are in lower case.

    None where it is missing, given twice, or no text.
    """
    parents, states = [], []
    for name, value in headers:
        key = name.decode("latin-1") if isinstance(name, bytes) else name
        if key == TRACEPARENT:
            parents.append(_text(value))
        elif key == TRACESTATE:
            states.append(_text(value))
    if len(parents) != 1:
        return None
    return parse_traceparent(parents[0], ",".join(states))


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value

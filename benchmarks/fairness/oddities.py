"""Floods of an unusual form: heads, chunks, upgrades and streams; and options that are legal and dear."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.fairness.flood import CALLS, CHAT, MODEL, TURN, Flood, Kind, at_paths, body_of, chat_post
from benchmarks.fairness.sends import Call, Calls, Post, Raw, Send
from triptych.protos import proxy_pb2

_HEALTH = "GET /health"
_LINE = b"GET /health HTTP/1.1\r\nHost: x\r\n"


def streams_left(scale: float) -> Sequence[Send]:
    fields = {"max_tokens": int(3000 * scale) or 1, "ignore_eos": True, "stream": True, "n": 4}
    return (Post(CHAT, body_of({"messages": TURN} | fields), leaves=True),)


def many_heads(scale: float) -> Sequence[Send]:
    """As many requests as a connection's first bytes hold, and as many headers as one request may have."""
    heads = _LINE + b"\r\n"
    close = _LINE + b"Connection: close\r\n\r\n"
    headers = _LINE + b"a:\r\n" * int(100_000 * scale) + b"\r\n"
    return Raw(_HEALTH, heads * int(8000 * scale) + close), Raw(_HEALTH, headers)


def tiny_chunks(scale: float) -> Sequence[Send]:
    body = body_of({"messages": [{"role": "user", "content": "x" * int(200_000 * scale)}], "max_tokens": 2})
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{{key}}Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    )
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    return (Raw(f"POST {CHAT}", head.encode() + chunks + b"0\r\n\r\n"),)


def upgrades(scale: float) -> Sequence[Send]:
    """To protocols that nobody speaks here, and what is no HTTP."""
    websocket = _LINE + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n"
    h2c = _LINE + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n\r\n"
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    close = _LINE + b"Connection: close\r\n\r\n"
    return tuple(Raw(_HEALTH, data + close) for data in (websocket, h2c, preface, b"\x16\x03\x01\x02\x00"))


def grpc_streams(scale: float) -> Sequence[Send]:
    request = proxy_pb2.ChatRequest(model=MODEL)
    request.messages.add(role="user").parts.add(text="hi")
    request.sampling.max_tokens = 2
    return (Calls(Call(CALLS[0], request.SerializeToString()), int(2000 * scale)),)


def dear_choices(scale: float) -> Sequence[Send]:
    fields = {"max_tokens": int(500 * scale), "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    return (chat_post(n=16, **fields), chat_post(n=16, stream=True, **fields))


def dear_options(scale: float) -> Sequence[Send]:
    """Each as long as it may be, and each wrong in its last place."""
    many = int(1000 * scale)
    bias = {str(number): 1.5 for number in range(min(many, 300))}
    nested: dict[str, Any] = {"type": "string", "pattern": "(a|b|ab){1,64}c?" * 4}
    for _ in range(int(12 * scale)):
        nested = {"type": "array", "items": {"anyOf": [nested, {"type": "integer"}]}}
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": nested}}}
    repeated = b'{"model":"demo","max_tokens":2,' + b'"user":"a",' * int(3000 * scale)
    repeated += b'"messages":' + json.dumps(TURN).encode() + b"}"
    return (
        chat_post(logit_bias=bias, max_tokens=64),
        chat_post(logit_bias=bias | {"-1": 1.0}),
        chat_post(stop_token_ids=list(range(min(many, 128))), stop=["x" * 1000] * 16, max_tokens=64),
        chat_post(bad_words=["\u0301" * 30] * min(many, 128), max_tokens=64),
        chat_post("e\u0301\u202e\U0001f3f4" * many, max_tokens=2),
        chat_post(tools=[{"type": "function", "function": function}], tool_choice="required", max_tokens=64),
        chat_post(guided_regex="((a|b)*c){1,40}" * 8, max_tokens=64),
        Post(CHAT, repeated),
    )


def refused_bodies(scale: float) -> Sequence[Send]:
    """Without a key: refused by their head, and their bodies come all the same."""
    return (Post(CHAT, b"x" * int(60_000_000 * scale)),)


_ROWS: tuple[tuple[str, str, Kind, frozenset[str], Callable[[float], Sequence[Send]], int, bool], ...] = (
    (
        "streams-left",
        "answers of 4 x 3,000 tokens whose client goes with the first one, 32 at once",
        "engine",
        at_paths(CHAT),
        streams_left,
        32,
        False,
    ),
    (
        "many-heads",
        "8,000 requests in one go, and one of 100,000 headers, without a key, on 16 connections",
        "loop",
        frozenset({_HEALTH}),
        many_heads,
        16,
        True,
    ),
    (
        "tiny-chunks",
        "bodies of 200 KB in chunks of one byte, 8 at once",
        "loop",
        at_paths(CHAT),
        tiny_chunks,
        8,
        False,
    ),
    (
        "upgrades",
        "upgrades to other protocols, and what is no HTTP, without a key, 8 at once",
        "loop",
        frozenset({_HEALTH}),
        upgrades,
        8,
        True,
    ),
    (
        "refused-bodies",
        "bodies of 60 MB without a key, 16 at once",
        "loop",
        at_paths(CHAT),
        refused_bodies,
        16,
        True,
    ),
    (
        "grpc-streams",
        "2,000 small calls at once over one connection",
        "engine",
        frozenset({CALLS[0]}),
        grpc_streams,
        1,
        False,
    ),
    (
        "dear-choices",
        "16 choices of 500 tokens with 20 logprobs, 4 calls at once",
        "engine",
        at_paths(CHAT),
        dear_choices,
        4,
        False,
    ),
    (
        "dear-options",
        "biases, stops, bad words, schemas, expressions, as long as may be, repeated keys, 8 at once",
        "engine",
        at_paths(CHAT),
        dear_options,
        8,
        False,
    ),
)
ODDITIES = tuple(
    Flood(name, sends, "text", kind, doors, make, clients, again=True, keyless=keyless)
    for name, sends, kind, doors, make, clients, keyless in _ROWS
)

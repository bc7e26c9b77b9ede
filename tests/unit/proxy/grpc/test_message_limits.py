"""Whatever a gRPC message holds in any of its fields, a valid call is bounded, as over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from support.hostile.calls import BESIDE_TEXT, refused_later, weight
from triptych.base.errors import RequestError
from triptych.base.request import MAX_TEXT, MAX_TOKEN_IDS
from triptych.protos import proxy_pb2
from triptych.proxy.grpc.request import call_of
from triptych.proxy.grpc.retrieval import embed_calls, rerank_pairs
from triptych.proxy.grpc.server import generate_call

LIMITS = {"max_images": 8, "timeout": 10.0}
READERS: dict[type, Callable[[Any], Any]] = {
    proxy_pb2.ChatRequest: partial(call_of, **LIMITS, max_choices=16),
    proxy_pb2.GenerateRequest: partial(generate_call, timeout=10.0, max_choices=16),
    proxy_pb2.EmbedRequest: partial(embed_calls, **LIMITS),
    proxy_pb2.RerankRequest: partial(rerank_pairs, **LIMITS),
}
HELLO = {"role": "assistant", "parts": [{"text": "x"}]}
#: What else a message needs to be valid, by the field that is looked at; "" is any.
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("ChatRequest", ""): {"messages": [HELLO]},
    ("ChatRequest", "tools"): {"messages": [HELLO]},
    ("GenerateRequest", ""): {"encoder_text": "x"},
    ("GenerateRequest", "encoder_text"): {},
    ("GenerateRequest", "encoder_token_ids"): {},
    ("GenerateRequest", "transcription"): {"audio": b"x"},
    ("GenerateRequest", "mm_processor_kwargs"): {"image": b"x"},
    ("EmbedRequest", ""): {"inputs": [{"text": "x"}]},
    ("EmbedRequest", "messages"): {},
    ("EmbedRequest", "chat_template_kwargs"): {"messages": [HELLO]},
    ("RerankRequest", ""): {"query": {"parts": [{"text": "x"}]}, "documents": [{"parts": [{"text": "x"}]}]},
}
#: What a message's part needs beside one of its fields.
INSIDE: dict[str, dict[str, Any]] = {"ChatMessage": HELLO, "ToolCall": {"name": "f", "arguments": "{}"}}
#: Files and where they are.
MEDIA = frozenset({"image", "image_url", "audio", "audio_url", "video", "video_url"})
IN_JSON = {
    "tools": '[{"type": "function", "function": {"name": "f", "description": "%s"}}]',
    **dict.fromkeys(("arguments", "mm_processor_kwargs", "chat_template_kwargs"), '{"a": "%s"}'),
    "json_schema": '{"description": "%s"}',
}


@dataclass(frozen=True)
class Leaf:
    """A field that may have any size: by its way from the message, whose last one it is."""

    kind: type
    way: tuple[Any, ...]

    @property
    def path(self) -> str:
        return ".".join(field.name for field in self.way)

    def message(self, size: int) -> Any:
        """A message with so many characters, or entries, in the field."""
        value = self._value(size)
        for field in reversed(self.way[:-1]):
            inside = INSIDE.get(field.message_type.name, {}) | value
            if field.message_type.name == "ChatMessage" and "parts" not in value:
                inside = {**inside, "role": value.get("role", "assistant")}
            value = {field.name: [inside] if field.is_repeated else inside}
        name, first = self.kind.__name__, self.way[0].name
        beside = BESIDE.get((name, first), BESIDE.get((name, ""), {}))
        return self.kind(**{**beside, **value})

    def _value(self, size: int) -> dict[str, Any]:
        field = self.way[-1]
        if not field.is_repeated:
            text = IN_JSON.get(field.name, "%s") % ("x" * size)
            return {field.name: text.encode() if field.type == field.TYPE_BYTES else text}
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return {field.name: {number: 1.0 for number in range(size)}}
        if field.message_type is not None:
            entry = {"text": "x"} if field.message_type.name in ("ChatPart", "EmbedInput") else {}
            entry = {"parts": [{"text": "x"}]} if field.message_type.name == "RankedContent" else entry
            return {field.name: [INSIDE.get(field.message_type.name, entry)] * size}
        return {field.name: [1 if field.type == field.TYPE_UINT32 else "x"] * size}


def leaves(kind: type, descriptor: Any, way: tuple[Any, ...] = ()) -> Iterator[Leaf]:
    for field in descriptor.fields:
        if field.name in MEDIA:
            continue
        inner = field.message_type
        if field.is_repeated or field.type in (field.TYPE_STRING, field.TYPE_BYTES):
            yield Leaf(kind, (*way, field))
        if inner is not None and not inner.GetOptions().map_entry:
            yield from leaves(kind, inner, (*way, field))


LEAVES = [leaf for kind in READERS for leaf in leaves(kind, kind.DESCRIPTOR)]  # type: ignore[attr-defined]


def read(leaf: Leaf, size: int) -> Any:
    """What is left of a message once it is read; the error where it is refused."""
    try:
        return READERS[leaf.kind](leaf.message(size))
    except RequestError as error:
        return error


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: f"{leaf.kind.__name__}: {leaf.path}")
async def test_a_field_that_is_larger_than_any_call_is_refused_or_leaves_no_trace(leaf: Leaf) -> None:
    small = read(leaf, 1)
    if isinstance(small, RequestError):
        # No other value of the field is one that the message takes.
        named = (small.param or "").replace("[0]", "").rpartition(".")[2]
        assert named in (*leaf.path.split("."), "tool_choice")
        return
    large = read(leaf, MAX_TOKEN_IDS + 1 if leaf.way[-1].is_repeated else MAX_TEXT + 1)
    if isinstance(large, RequestError) or await refused_later(large):
        return
    assert weight(large) < BESIDE_TEXT, f"{leaf.path} needs a limit: see triptych/base/request.py"

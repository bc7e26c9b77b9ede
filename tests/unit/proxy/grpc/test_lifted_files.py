"""Files of large messages are lifted out before protobuf copies them, and what is parsed is the same."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from triptych.protos import proxy_pb2
from triptych.proxy.grpc.message_fields import lift_files, message_of
from triptych.proxy.grpc.server import parses_of
from triptych.proxy.media.source import FilePart, LiftedFile
from triptych.proxy.parsing.lifted import LEAST, parse_lifted
from triptych.proxy.parsing.parse import Parse

FILE, OTHER = random.Random(7).randbytes(LEAST), random.Random(8).randbytes(LEAST + 3)
SHORT = b"x" * (LEAST - 1)
PARSES = parses_of(max_images=16, timeout=9.0, max_choices=16)


def chat(*parts: dict[str, Any]) -> proxy_pb2.ChatRequest:
    message = proxy_pb2.ChatMessage(role="user", parts=[proxy_pb2.ChatPart(**part) for part in parts])
    return proxy_pb2.ChatRequest(messages=[message])


MESSAGES: dict[str, tuple[str, Any, list[bytes]]] = {
    "one picture": ("Chat", chat({"image": FILE}), [FILE]),
    "pictures, a sound and texts": (
        "Chat",
        chat(
            {"text": "a"}, {"image": FILE}, {"audio": OTHER}, {"text": "b"}, {"image": SHORT}, {"video": FILE}
        ),
        [FILE, OTHER, SHORT, FILE],
    ),
    "a long text": ("Chat", chat({"text": "x" * LEAST}, {"image": FILE}), [FILE]),
    "a sound that is generated from": ("Generate", proxy_pb2.GenerateRequest(audio=FILE), [FILE]),
}


def files_of(made: Any) -> list[bytes]:
    """The bytes of all files of a request, in order."""
    call = made.call
    given = [part for message in call.messages for part in message.content if isinstance(part, FilePart)]
    if call.encoder is not None:
        given.append(call.encoder.source)
    return [bytes(part.source.view) if isinstance(part.source, LiftedFile) else part.source for part in given]


def parsed(name: str, raw: bytes, descriptor: Any) -> tuple[list[bytes], list[int]]:
    """The files of the request, and the lengths of what protobuf has parsed for it."""
    sizes: list[int] = []
    parse: Parse[Any] = PARSES[f"/triptych.v1.ProxyService/{name}"]

    def work(given: bytes) -> Any:
        sizes.append(len(given))
        return parse(given)

    return files_of(parse_lifted(work, raw, partial(lift_files, descriptor=descriptor))), sizes


@pytest.mark.parametrize("name", MESSAGES)
def test_protobuf_parses_a_message_without_its_files_and_the_request_has_them(name):
    method, message, files = MESSAGES[name]
    raw = message.SerializeToString()
    long = [file for file in files if len(file) >= LEAST]
    made, sizes = parsed(method, raw, message.DESCRIPTOR)
    assert made == files
    assert len(sizes) == 1
    assert sizes[0] <= len(raw) - sum(map(len, long)) + 64 * len(long)


def test_a_file_that_a_later_one_takes_the_place_of_is_as_protobuf_says():
    both = proxy_pb2.ChatPart(image=FILE), proxy_pb2.ChatPart(audio=OTHER)
    part = b"".join(one.SerializeToString() for one in both)
    body = b"\x0a\x04user\x12" + varint(len(part)) + part
    raw = b"\x12" + varint(len(body)) + body
    (kind,) = message_of(raw, proxy_pb2.ChatRequest).messages[0].parts
    assert kind.WhichOneof("body") == "audio"
    assert parsed("Chat", raw, proxy_pb2.ChatRequest.DESCRIPTOR)[0] == [OTHER]


@pytest.mark.parametrize("make", [lambda: chat({"image": SHORT}), lambda: chat({"text": "x" * LEAST})])
def test_a_message_without_long_files_stays_as_it_is(make: Callable[[], proxy_pb2.ChatRequest]):
    raw = make().SerializeToString()
    assert lift_files(raw, proxy_pb2.ChatRequest.DESCRIPTOR) == (raw, {})


def varint(value: int) -> bytes:
    return proxy_pb2.ChatRequest(n=value).SerializeToString()[1:]


def test_nothing_keeps_a_message_that_was_lifted_from_until_garbage_is_collected() -> None:
    raw = chat({"text": "a"}, {"image": FILE}).SerializeToString()
    gc.collect()
    gc.disable()
    try:
        held = sys.getrefcount(raw)
        lift_files(raw, proxy_pb2.ChatRequest.DESCRIPTOR)
        assert sys.getrefcount(raw) == held
    finally:
        gc.enable()

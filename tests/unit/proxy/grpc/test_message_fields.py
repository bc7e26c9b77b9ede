"""Values are counted without parsing, as the parser would find them."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from triptych.base.errors import InvalidRequest, TooLarge
from triptych.protos import common_pb2, proxy_pb2
from triptych.proxy.grpc.message_fields import MAX_FIELDS, has_at_most, message_of

CHAT = proxy_pb2.ChatRequest.DESCRIPTOR


def request(messages: int, parts: int) -> bytes:
    message = proxy_pb2.ChatMessage(role="user", parts=[proxy_pb2.ChatPart(text="x")] * parts)
    return proxy_pb2.ChatRequest(messages=[message] * messages).SerializeToString()


def test_fields_of_messages_in_messages_count_and_those_of_texts_do_not() -> None:
    # Of each message: itself, its role and, of each part, the part and its text.
    for messages, parts in ((1, 1), (3, 4), (10, 0)):
        count = messages * (2 + 2 * parts)
        assert has_at_most(count, request(messages, parts), CHAT)
        assert not has_at_most(count - 1, request(messages, parts), CHAT)
    text = proxy_pb2.ChatRequest(model="\n\x00" * 1000).SerializeToString()
    assert has_at_most(1, text, CHAT)


def test_packed_numbers_are_one_field_and_single_ones_are_many() -> None:
    descriptor = common_pb2.TokenIds.DESCRIPTOR
    assert has_at_most(1, common_pb2.TokenIds(ids=range(1000)).SerializeToString(), descriptor)
    assert not has_at_most(999, b"\x08\x01" * 1000, descriptor)


def test_the_largest_requests_that_are_served_pass() -> None:
    conversation = request(2048, 1)
    assert message_of(conversation, proxy_pb2.ChatRequest).SerializeToString() == conversation
    inputs = [proxy_pb2.EmbedInput(token_ids=common_pb2.TokenIds(ids=[1, 2]))] * 2048
    message_of(proxy_pb2.EmbedRequest(inputs=inputs).SerializeToString(), proxy_pb2.EmbedRequest)
    documents = [proxy_pb2.RankedContent(parts=[proxy_pb2.ChatPart(text="x")])] * 2048
    message_of(proxy_pb2.RerankRequest(documents=documents).SerializeToString(), proxy_pb2.RerankRequest)


@pytest.mark.parametrize(
    "before",
    [b"\x9b\x06\x9c\x06", b"\x12\x7f", b"\xff" * 11],
    ids=["a group", "a message that is longer than all", "no number"],
)
def test_what_cannot_be_walked_hides_no_fields(before: bytes) -> None:
    """protobuf's parser takes unknown groups, and keeps all that comes before what it refuses."""
    for raw in (before + b"\x12\x00" * (MAX_FIELDS + 1), b"\x12\x00" * (MAX_FIELDS + 1) + before):
        with pytest.raises((TooLarge, InvalidRequest)):
            message_of(raw, proxy_pb2.ChatRequest)
    nested = b"\x22\x00" * (MAX_FIELDS + 1)  # empty parts
    length = proxy_pb2.ChatRequest(model="x" * len(nested)).SerializeToString()[1 : -len(nested)]
    with pytest.raises((TooLarge, InvalidRequest)):
        message_of(b"\x12" + length + nested + before, proxy_pb2.ChatRequest)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_as_protobuf_says_or_are_refused(raw: bytes) -> None:
    try:
        message = message_of(raw, proxy_pb2.ChatRequest)
    except InvalidRequest:
        return
    try:
        expected = proxy_pb2.ChatRequest.FromString(raw)
    except DecodeError:
        raise AssertionError("protobuf refuses it") from None
    assert message == expected

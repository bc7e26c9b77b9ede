"""Values are counted without parsing, as the parser would find them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.base.errors import TooLarge
from triptych.protos import common_pb2, proxy_pb2
from triptych.proxy.grpc import admission as message_fields
from triptych.proxy.grpc.admission import check_fields

CHAT = proxy_pb2.ChatRequest.DESCRIPTOR


def request(messages: int, parts: int) -> bytes:
    message = proxy_pb2.ChatMessage(role="user", parts=[proxy_pb2.ChatPart(text="x")] * parts)
    return proxy_pb2.ChatRequest(messages=[message] * messages).SerializeToString()


def test_fields_of_messages_in_messages_count_and_those_of_texts_do_not(monkeypatch):
    # Of each message: itself, its role and, of each part, the part and its text.
    for messages, parts in ((1, 1), (3, 4), (10, 0)):
        count = messages * (2 + 2 * parts)
        monkeypatch.setattr(message_fields, "MAX_FIELDS", count)
        check_fields(request(messages, parts), CHAT)
        monkeypatch.setattr(message_fields, "MAX_FIELDS", count - 1)
        with pytest.raises(TooLarge):
            check_fields(request(messages, parts), CHAT)
    text = proxy_pb2.ChatRequest(model="\n\x00" * 1000).SerializeToString()
    monkeypatch.setattr(message_fields, "MAX_FIELDS", 1)
    check_fields(text, CHAT)


def test_packed_numbers_are_one_field_and_single_ones_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_fields, "MAX_FIELDS", 10)
    descriptor = common_pb2.TokenIds.DESCRIPTOR
    check_fields(common_pb2.TokenIds(ids=range(1000)).SerializeToString(), descriptor)
    with pytest.raises(TooLarge):
        check_fields(b"\x08\x01" * 1000, descriptor)


def test_the_largest_request_that_is_served_passes() -> None:
    check_fields(request(2048, 1), CHAT)


@given(st.binary(max_size=200))
def test_any_bytes_end_soon_and_are_left_to_the_parser(raw: bytes) -> None:
    check_fields(raw, CHAT)

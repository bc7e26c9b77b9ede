"""Embed of gRPC with a vector for each token."""

from __future__ import annotations

from typing import Any

import pytest

from triptych.base.errors import InvalidRequest
from triptych.protos import proxy_pb2
from triptych.proxy.call.chat import ChatCall, PoolingOptions
from triptych.proxy.grpc.retrieval import embed_calls

TEXT = {"text": "x"}
PICTURE = {"image_url": "http://example.com/a"}
DOCUMENT = {"role": "document", "parts": [TEXT]}


def calls(**fields: Any) -> list[ChatCall]:
    return embed_calls(proxy_pb2.EmbedRequest(tokens=True, **fields), max_images=2, timeout=9.0)


def test_inputs_and_one_message_ask_for_a_vector_for_each_token() -> None:
    options = PoolingOptions(tokens=True, normalize=False, dimensions=8)
    both = calls(inputs=[{"text": "a"}, {"token_ids": {"ids": [1, 2]}}], dimensions=8, normalize=False)
    assert [call.prompt for call in both] == ["a", (1, 2)]
    assert [call.pooling for call in both] == [options] * 2
    [call] = calls(messages=[{"role": "query", "parts": [PICTURE, TEXT]}], priority=3)
    [message] = call.messages
    assert (message.role, len(message.content or ()), call.priority) == ("query", 2, 3)
    assert call.pooling == PoolingOptions(tokens=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [DOCUMENT, DOCUMENT]}, "messages"),
        ({"messages": [{"role": "assistant", "parts": [TEXT]}]}, "messages[0].role"),
        ({"messages": [{"role": "query"}]}, "messages[0].parts"),
        ({"messages": [{"role": "query", "parts": [PICTURE] * 3}]}, "messages"),
        ({"inputs": [TEXT], "pooling": "last"}, "pooling"),
        ({"messages": [DOCUMENT], "generation_prompt": True}, "generation_prompt"),
        ({"messages": [DOCUMENT], "chat_template_kwargs": "{}"}, "chat_template_kwargs"),
    ],
)
def test_what_a_vector_for_each_token_does_not_know_is_refused_by_name(fields: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        calls(**fields)
    assert refused.value.param == param

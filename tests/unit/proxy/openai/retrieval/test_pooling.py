"""POST /pooling: bodies that become calls, those that are refused, and its reply's parts."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest

from triptych.base.errors import InvalidRequest
from triptych.base.types import FinishReason, Task, Usage
from triptych.proxy.call.chat import Done, PoolingOptions, Timings
from triptych.proxy.call.validation import ModelKind, fit
from triptych.proxy.openai.retrieval.embeddings import EmbeddingRequest
from triptych.proxy.openai.retrieval.pooling import parse_pooling, pooling_data

PICTURE = {"type": "image_url", "image_url": {"url": "http://example.com/a"}}
TEXT = {"type": "text", "text": "x"}


def parse(**body: Any) -> EmbeddingRequest:
    return parse_pooling(json.dumps(body).encode(), "r", max_images=2, timeout=9.0)


def message(content: Any, role: str = "document") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


def test_each_input_is_a_prompt_as_it_is() -> None:
    request = parse(input=["a", "b"], dimensions=8, use_activation=False, task="token_embed")
    assert [call.prompt for call in request.calls] == ["a", "b"]
    assert request.calls[0].pooling == PoolingOptions(tokens=True, normalize=False, dimensions=8)
    assert [call.prompt for call in parse(input=[1, 2]).calls] == [(1, 2)]
    assert parse(input="a", encoding_format="base64", embed_dtype="float32", endianness="little").as_base64


@pytest.mark.parametrize(
    ("task", "path"), [("generate", "/v1/embeddings"), ("embed", "/v1/embeddings"), ("score", "/v1/rerank")]
)
def test_a_model_without_vectors_of_tokens_names_what_it_gives_and_what_has_them(task: Task, path: str):
    what = "scores" if task == "score" else "embeddings"
    (call,) = parse(input="a").calls
    with pytest.raises(InvalidRequest) as error:
        fit(call, ModelKind(pools=True, task=task))
    assert error.value.message == (
        f"model: the model gives {what}: use POST {path}, or another model: "
        "a vector for each token needs a late-interaction one, such as ColPali"
    )
    assert fit(call, ModelKind(pools=True, task="token_embed")) is call


@pytest.mark.parametrize("role", ["query", "document", "user"])
def test_a_message_keeps_its_role_and_its_parts_their_order(role: str) -> None:
    (call,) = parse(**message([PICTURE, TEXT], role)).calls
    (written,) = call.messages
    assert (written.role, len(written.content or ()), call.prompt) == (role, 2, None)
    assert call.pooling == PoolingOptions(tokens=True)
    assert parse(**message("x", role)).calls[0].messages[0].content == "x"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "messages"),
        ({"input": "x", **message("x")}, "input", "not both"),
        ({"input": []}, "input", "empty"),
        ({"input": "x", "task": "embed"}, "task", "/v1/embeddings"),
        ({"input": "x", "embed_dtype": "float16"}, "embed_dtype", "float16"),
        ({"input": "x", "endianness": "big"}, "endianness", "big"),
        ({"input": "x", "encoding_format": "bytes"}, "encoding_format", "bytes"),
        ({"input": "x", "dimensions": 0}, "dimensions", "1"),
        ({"input": "x", "add_special_tokens": False}, "add_special_tokens", "token ids"),
        ({"input": "x", "truncate_prompt_tokens": 4}, "truncate_prompt_tokens", "send less"),
        ({"messages": [message("x")["messages"][0]] * 2}, "messages", "1"),
        (message("x", "assistant"), "messages[0].role", "assistant"),
        (message(""), "messages[0].content", "empty"),
        (message([]), "messages[0].content", "empty"),
        (message([PICTURE] * 3), "messages", "at most 2"),
    ],
)
def test_what_is_not_served_is_refused_by_its_field(body: Any, param: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**body)
    assert caught.value.param == param
    assert says in caught.value.message


def test_vectors_are_lists_in_a_list_or_base64_of_all_of_them() -> None:
    done = Done(FinishReason.STOP, Usage(3, 0, 0), Timings(), pooled=struct.pack("<6f", *range(6)))
    part = json.loads(pooling_data(4, done, as_base64=False))
    assert part == {"object": "pooling", "index": 4, "data": [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]}
    part = json.loads(pooling_data(0, done, as_base64=True))
    assert base64.b64decode(part["data"]) == done.pooled


def test_base64_of_many_vectors_is_one_text() -> None:
    done = Done(FinishReason.STOP, Usage(1 << 17, 0, 0), Timings(), pooled=bytes(range(256)) * (1 << 14))
    assert base64.b64decode(json.loads(pooling_data(0, done, as_base64=True))["data"]) == done.pooled

"""A wrong request costs the proxy no more than a few right ones, whatever is wrong with it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from support.hostile.bare_door import CALLS, BareDoor
from support.hostile.large_messages import FORM
from triptych.protos import proxy_pb2
from triptych.proxy.openai.app import ENDPOINTS

#: Good requests that a bad one may cost, by CPU time of the thread with the event loop.
MOST = 5.0
_TURNS = [{"role": "user", "content": "hi"}]
_ROLE, _PART = [{"role": "x", "content": "hi"}], [{"role": "user", "content": [{"type": "x"}]}]
_CHAT: list[Mapping[str, Any]] = [
    {"messages": _TURNS},
    {},
    {"messages": _ROLE},
    {"messages": _PART},
    {"messages": []},
    {"messages": 3},
]
_SAMPLING: list[Mapping[str, Any]] = [{"temperature": 3}, {"temperature": "3"}]


def _with(good: Mapping[str, Any], *wrong: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [good, *({**good, **fields} for fields in ({"model": 3}, *wrong))]


def _ranked(name: str, other: str) -> list[Mapping[str, Any]]:
    return _with({name: "x", other: ["y"]}, {other: [3]}, {other: []}, {name: {"text": 3}}, {other: None})


def _form(name: str, value: bytes) -> bytes:
    return (
        b'--edge\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n'
        + f'--edge\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode()
        + value
        + b"\r\n--edge--\r\n"
    )


_FORMS = [_form("model", b"m"), _form("temperature", b"9"), _form("response_format", b"x"), b"rubbish", b""]
#: By path: a good body, and then wrong ones.
BODIES: dict[str, list[Any]] = {
    "/v1/chat/completions": [
        *_CHAT,
        *_with(
            {"messages": _TURNS},
            {"response_format": {"type": "x"}},
            {"tools": [{"type": "x"}]},
            {"tool_choice": "x"},
            {"reasoning_effort": "x"},
            {"logit_bias": {"x": 1}},
            {"guided_json": "{"},
            {"n": 99},
            {"stream_options": 3},
            *_SAMPLING,
        )[1:],
        b"{",
        b"[]",
    ],
    "/v1/completions": [
        *_with({"prompt": "hi"}, {"prompt": {"x": 3}}, {"prompt": [[]]}, {"logprobs": 99}, *_SAMPLING),
        b"{",
    ],
    "/v1/responses": _with(
        {"input": "hi"},
        {"input": [{"type": "x"}]},
        {"input": _PART},
        {"text": {"format": {"type": "x"}}},
        *_SAMPLING,
        {"tools": [{"type": "x"}]},
    ),
    "/v1/messages": _with(
        {"messages": _TURNS, "max_tokens": 2}, {"messages": _PART}, {"tools": [3]}, *_SAMPLING
    ),
    "/v1/messages/count_tokens": [
        {"messages": _TURNS, "model": "demo"},
        {"messages": _PART, "model": "demo"},
    ],
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations"), _FORMS),
    "/v1/embeddings": _with(
        {"input": "hi"}, {"encoding_format": "x"}, {"dimensions": 0}, {"messages": _ROLE}
    ),
    "/pooling": _with({"input": "hi"}, {"encoding_format": "x"}, {"dimensions": 0}, {"messages": _ROLE}),
    **dict.fromkeys(("/v1/rerank", "/rerank"), _ranked("query", "documents")),
    **dict.fromkeys(("/v1/score", "/score"), _ranked("text_1", "text_2")),
    "/tokenize": [{"prompt": "hi"}, *_CHAT[1:]],
    "/detokenize": [{"tokens": [1]}, {"tokens": ["x"]}, {"tokens": [-1]}, {}],
}
_HI = [proxy_pb2.ChatMessage(role="user", parts=[proxy_pb2.ChatPart(text="hi")])]
_X = proxy_pb2.RankedContent(parts=[proxy_pb2.ChatPart(text="x")])
#: By method, the same.
MESSAGES: dict[str, list[Any]] = {
    "Chat": [
        proxy_pb2.ChatRequest(messages=_HI),
        proxy_pb2.ChatRequest(),
        proxy_pb2.ChatRequest(messages=[proxy_pb2.ChatMessage(role="x")]),
        proxy_pb2.ChatRequest(messages=_HI, tools=proxy_pb2.ChatTools(tools="{")),
        proxy_pb2.ChatRequest(messages=_HI, tools=proxy_pb2.ChatTools(choice="x")),
        proxy_pb2.ChatRequest(messages=_HI, mm_processor_kwargs="[" * 99),
        b"\xff" * 20,
        b"\x12\x00" * 30_000,
    ],
    "Generate": [proxy_pb2.GenerateRequest(encoder_text="x"), proxy_pb2.GenerateRequest()],
    "Embed": [proxy_pb2.EmbedRequest(inputs=[proxy_pb2.EmbedInput(text="x")]), proxy_pb2.EmbedRequest()],
    "Rerank": [proxy_pb2.RerankRequest(query=_X, documents=[_X]), proxy_pb2.RerankRequest(query=_X)],
    "ListModels": [proxy_pb2.ListModelsRequest(), b"\xff" * 20],
}


def _raw(message: Any) -> bytes:
    if isinstance(message, bytes):
        return message
    return json.dumps(message).encode() if isinstance(message, dict) else message.SerializeToString()


@pytest.fixture
async def door() -> AsyncIterator[BareDoor]:
    made = BareDoor()
    yield made
    await made.parsers.close()


def test_every_endpoint_and_every_call_has_wrong_requests() -> None:
    assert set(BODIES) == set(ENDPOINTS)
    assert set(MESSAGES) == CALLS
    assert FORM.endswith("boundary=edge")


async def test_an_error_costs_no_more_than_five_good_requests(door: BareDoor) -> None:
    dear = {}
    for table, ask in ((BODIES, door.post), (MESSAGES, door.call)):
        for target, (good, *wrong) in table.items():
            for message in wrong:
                ratio = await _ratio(ask, target, _raw(good), _raw(message), door)
                if ratio > MOST:
                    dear[f"{target}: {_raw(message)[:60]!r}"] = round(ratio, 1)
    assert not dear


async def _ratio(ask: Any, target: str, good: bytes, wrong: bytes, door: BareDoor) -> float:
    """Of the best of five rounds each, interleaved."""
    before = door.parsed
    await ask(target, good)
    assert door.parsed > before, f"the good one of {target} is not"
    after = door.parsed
    await ask(target, wrong)
    assert door.parsed == after, f"{wrong[:60]!r} of {target} is not wrong"
    costs = {}
    for _ in range(5):
        for raw in (good, wrong):
            began = time.thread_time()
            for _ in range(4):
                await ask(target, raw)
            costs[raw] = min(costs.get(raw, 1e9), time.thread_time() - began)
    return costs[wrong] / costs[good]

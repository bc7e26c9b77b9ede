"""What floods of large requests cost the proxy: memory within its budgets, at both doors, by key or without.

The peak is the kernel's (VmHWM) of a real process, against the flags that it was given.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from support.fakes.fake_workers import MODEL, picture
from support.fakes.proxy_fakes import raw_post
from support.matrix import matrix
from support.processes.proxy_process import ProxyProcess, proxy_process
from support.waiting import until
from triptych.protos import proxy_pb2, proxy_pb2_grpc
from triptych.store.embedding_store import EmbeddingStore

MIB = 1 << 20
KEYS = "tk-flood-0123456789", "tk-other-0123456789"
BEARER, OTHER = (f"Bearer {key}" for key in KEYS)
BODY, BUDGET, MEDIA = 16 * MIB, 64 * MIB, 64 * MIB
FLAGS = ("--max-body", "16MiB", "--body-memory", "64MiB", "--media-memory", "64MiB")
#: Of bodies or messages beside their budget: one that is parsed, whose text may take four bytes a character,
#: and parts of the one before it and the one behind it, which are refused and joined.
TRANSIENT = 6 * BODY
#: What windows, connections and the allocator take beside what is counted.
SLACK = 40 * MIB
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
CALLS = 24


@pytest.fixture
async def proxy(store: EmbeddingStore, store_url: str, tmp_path: Path) -> AsyncIterator[ProxyProcess]:
    async with proxy_process(store, store_url, tmp_path, *FLAGS, "--api-key", ",".join(KEYS)) as process:
        yield process


def chat(*, image: bytes = b"", text: str = "hello") -> proxy_pb2.ChatRequest:
    parts = [proxy_pb2.ChatPart(text=text)]
    if image:
        parts.append(proxy_pb2.ChatPart(image=image))
    request = proxy_pb2.ChatRequest(messages=[proxy_pb2.ChatMessage(role="user", parts=parts)])
    request.sampling.max_tokens = 4
    return request


def image_body(name: str, size: int) -> bytes:
    url = "data:image/png;base64," + base64.b64encode(picture(name, size)).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "x"}]
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": parts}]}).encode()


def text_body(text: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}]}, ensure_ascii=False).encode()


async def call(proxy: ProxyProcess, request: proxy_pb2.ChatRequest, key: str = "") -> aio.AioRpcError | None:
    """One Chat on a connection of its own: its error, or None when it was answered."""
    async with aio.insecure_channel(f"127.0.0.1:{proxy.grpc_port}", options=OPTIONS) as channel:
        stub: Any = proxy_pb2_grpc.ProxyServiceStub(channel)
        metadata = (("authorization", key),) if key else ()
        try:
            async for _ in stub.Chat(request, metadata=metadata, timeout=120):
                pass
        except aio.AioRpcError as error:
            return error
    return None


async def codes(calls: list[Any]) -> Counter[str]:
    errors = await asyncio.gather(*calls)
    return Counter("OK" if error is None else error.code().name for error in errors)


async def post(proxy: ProxyProcess, body: bytes, key: str = "") -> int:
    """The status of one POST; 0 when the connection ended while the body was still being sent."""
    try:
        headers = {"Authorization": key} if key else {}
        return (await raw_post(proxy.port, body, headers))[0]
    except OSError:
        return 0


async def test_messages_without_a_key_are_never_read(proxy: ProxyProcess) -> None:
    before = proxy.forget_peak()
    request = chat(image=picture("keyless", BODY - MIB))
    found = await codes([call(proxy, request, key) for key in ["", "Bearer wrong-0123456789"] * (CALLS // 2)])
    assert found == {"UNAUTHENTICATED": CALLS}
    assert proxy.memory("VmHWM") - before < SLACK


async def test_bodies_without_a_key_are_never_read(proxy: ProxyProcess) -> None:
    before = proxy.forget_peak()
    body = image_body("keyless", 11 * MIB)
    found = Counter(await asyncio.gather(*(post(proxy, body) for _ in range(CALLS))))
    assert set(found) <= {0, 401}
    assert proxy.memory("VmHWM") - before < SLACK


@pytest.mark.parametrize("kind", matrix(["image", "text"]))
async def test_messages_with_a_key_stay_within_the_budgets(proxy: ProxyProcess, kind: str) -> None:
    before = proxy.forget_peak()
    if kind == "image":
        requests = [chat(image=picture(f"keyed {index}", BODY - MIB)) for index in range(CALLS)]
    else:
        requests = [chat(text=f"{index} " + "x" * (BODY - MIB)) for index in range(CALLS)]
    errors = await asyncio.gather(*(call(proxy, request, BEARER) for request in requests))
    assert proxy.memory("VmHWM") - before < BUDGET + MEDIA + TRANSIENT + SLACK
    refused = [error for error in errors if error is not None]
    if kind == "image":
        assert len(refused) < CALLS
        assert {error.code().name for error in refused} <= {"RESOURCE_EXHAUSTED"}
        assert all("retry-after" in dict(error.trailing_metadata()) for error in refused)
    else:
        # More than any model takes: refused before it is copied on its way to a worker.
        assert {error.code().name for error in refused} == {"INVALID_ARGUMENT"}
        assert not proxy.pd.submits


@pytest.mark.parametrize("kind", matrix(["text", "image"]))
async def test_bodies_with_a_key_stay_within_the_budgets(proxy: ProxyProcess, kind: str) -> None:
    before = proxy.forget_peak()
    if kind == "image":
        bodies = [image_body(f"keyed {index}", 11 * MIB) for index in range(CALLS)]
    else:
        # One character above the first plane makes four bytes of each.
        bodies = [text_body(f"\N{GRINNING FACE}{index} " + "x" * (BODY - MIB)) for index in range(CALLS)]
    found = Counter(await asyncio.gather(*(post(proxy, body, BEARER) for body in bodies)))
    assert proxy.memory("VmHWM") - before < BUDGET + MEDIA + TRANSIENT + SLACK
    # A refused body's rest is not read, so that its reply may be lost with the connection.
    assert set(found) <= ({0, 200, 429} if kind == "image" else {0, 400, 429})
    assert found[200 if kind == "image" else 400]


async def test_calls_one_after_the_other_leave_nothing(proxy: ProxyProcess) -> None:
    """Refused ones too: what ends a call must not keep its message."""
    before = proxy.forget_peak()
    for index in range(CALLS):
        error = await call(proxy, chat(text="x" * (BODY - MIB), image=b"no picture"), BEARER)
        assert error.code().name == "INVALID_ARGUMENT"
        assert await call(proxy, chat(image=picture(f"one by one {index}", MIB)), BEARER) is None
    assert proxy.memory("VmHWM") - before < TRANSIENT + SLACK


@pytest.mark.parametrize("door", matrix(["http", "grpc"]))
async def test_many_tiny_values_are_counted_before_they_are_parsed(proxy: ProxyProcess, door: str) -> None:
    before = proxy.forget_peak()
    if door == "grpc":
        request = proxy_pb2.ChatRequest.FromString(b"\x12\x00" * (7 * MIB))
        for _ in range(4):
            error = await call(proxy, request, BEARER)
            assert "fields" in (error.details() or "")
    else:
        body = b'{"messages":[' + b"{}," * (5 * MIB) + b"{}]}"
        assert [await post(proxy, body, BEARER) for _ in range(4)] == [413] * 4
    assert proxy.memory("VmHWM") - before < TRANSIENT + SLACK


async def test_a_second_message_of_a_call_is_never_read(proxy: ProxyProcess) -> None:
    proxy.pd.gate.clear()
    before = proxy.forget_peak()
    big = chat(image=picture("second", BODY - MIB)).SerializeToString()
    async with aio.insecure_channel(f"127.0.0.1:{proxy.grpc_port}", options=OPTIONS) as channel:
        method = channel.stream_stream("/triptych.v1.ProxyService/Chat")
        calls = [method(metadata=(("authorization", BEARER),), timeout=120) for _ in range(CALLS)]
        writes = []
        for open_call in calls:
            await open_call.write(chat().SerializeToString())
            writes.append(asyncio.create_task(open_call.write(big)))
        await until(lambda: len(proxy.pd.submits) == CALLS)
        proxy.pd.gate.set()
        for open_call in calls:
            assert [event async for event in open_call]
        await asyncio.gather(*writes, return_exceptions=True)
    assert proxy.memory("VmHWM") - before < TRANSIENT + SLACK

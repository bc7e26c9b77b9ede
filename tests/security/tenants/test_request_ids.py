"""A client's X-Request-ID is a label: whoever sends it, however often, answers stay apart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import pytest

from support.chaos.rest import assert_at_rest
from support.hostile.guarded import FAMILY, Guarded
from support.processes.cluster import PATIENCE
from triptych.base.rpc.channels import make_channel
from triptych.protos import common_pb2, proxy_pb2, proxy_pb2_grpc

pytestmark = pytest.mark.timeout(300)

SAME = "one-id-of-many"
RETRIES = 15
LONG = 400


@pytest.fixture
def busy_core() -> Iterator[None]:
    """Somebody else's process that takes a core, so that the proxy's tasks run late."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture
async def web(guarded: Guarded) -> AsyncIterator[httpx2.AsyncClient]:
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=guarded.cluster.url, timeout=60.0, limits=limits) as client:
        yield client
    await asyncio.to_thread(assert_at_rest, guarded.cluster)


def body_of(question: str, **options: Any) -> dict[str, Any]:
    """Sampled from the question's own seed, so that an answer to another question shows."""
    messages = [{"role": "user", "content": question}]
    sampled = {"temperature": 1.0, "seed": zlib.crc32(question.encode()), "max_tokens": 8}
    rest = {"ignore_eos": True, "return_token_ids": True}
    return {"model": FAMILY, "messages": messages, **sampled, **rest, **options}


def headers_of(guarded: Guarded, tenant: str, request_id: str = SAME) -> dict[str, str]:
    return {"Authorization": f"Bearer {guarded.keys[tenant]}", "X-Request-ID": request_id}


async def ask(
    web: httpx2.AsyncClient, guarded: Guarded, tenant: str, question: str, request_id: str = SAME
) -> list[int]:
    """The answer's token ids, after a look at what names it."""
    reply = await web.post(
        "/v1/chat/completions", json=body_of(question), headers=headers_of(guarded, tenant, request_id)
    )
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-request-id"] == request_id
    assert reply.json()["id"] == f"chatcmpl-{request_id}"
    return list(reply.json()["choices"][0]["token_ids"])


async def expected(
    web: httpx2.AsyncClient, guarded: Guarded, tenant: str, questions: list[str]
) -> list[list[int]]:
    """Answers under ids that nobody else uses; all differ."""
    answers = [
        await ask(web, guarded, tenant, question, f"{tenant}-{at}") for at, question in enumerate(questions)
    ]
    assert len({tuple(answer) for answer in answers}) == len(questions)
    return answers


async def drop_a_stream(guarded: Guarded, tenant: str, question: str) -> None:
    """A stream under the common id whose client goes away in the middle."""
    body = json.dumps(body_of(question, stream=True, max_tokens=LONG)).encode()
    words = {**headers_of(guarded, tenant), "Host": "x", "Content-Length": str(len(body))}
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx2.URL(guarded.cluster.url).port)
    head = "".join(f"{name}: {value}\r\n" for name, value in words.items())
    writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n".encode() + body)
    try:
        async with asyncio.timeout(PATIENCE):
            while b'"token_ids":[' not in await reader.readline():
                assert not reader.at_eof()
    finally:
        writer.transport.abort()


async def test_a_dropped_streams_id_is_free_at_once_for_another_tenant(web, guarded, busy_core):
    question = "what has this to do with the other tenant?"
    (answer,) = await expected(web, guarded, "bob", [question])
    for retry in range(RETRIES):
        await drop_a_stream(guarded, "alice", f"a long story, number {retry}")
        assert await ask(web, guarded, "bob", question) == answer, retry


async def test_requests_in_flight_under_one_id_are_answered_apart(web, guarded):
    questions = [f"question {number} among many at once" for number in range(8)]
    tenants = ["alice", "bob"]
    answers = {tenant: await expected(web, guarded, tenant, questions) for tenant in tenants}
    asked = [(tenant, number) for number in range(len(questions)) for tenant in tenants]
    got = await asyncio.gather(*(ask(web, guarded, tenant, questions[number]) for tenant, number in asked))
    assert list(got) == [answers[tenant][number] for tenant, number in asked]


async def test_choices_and_prompts_of_one_id_are_answered_apart(web, guarded):
    """A label with a choice's or a prompt's number behind it is one of another request."""
    body = {**body_of("n answers"), "n": 4}
    own = headers_of(guarded, "bob", "an-id-of-its-own")
    alone = (await web.post("/v1/chat/completions", json=body, headers=own)).json()
    replies = await asyncio.gather(
        *(web.post("/v1/chat/completions", json=body, headers=headers_of(guarded, "bob")) for _ in range(4))
    )
    for reply in replies:
        assert reply.status_code == 200, reply.text
        assert [choice["token_ids"] for choice in reply.json()["choices"]] == [
            choice["token_ids"] for choice in alone["choices"]
        ]


async def test_both_doors_may_use_one_id_at_once(web: httpx2.AsyncClient, guarded: Guarded) -> None:
    question = "asked at both doors"
    (answer,) = await expected(web, guarded, "alice", [question])
    part = proxy_pb2.ChatPart(text=question)
    request = proxy_pb2.ChatRequest(
        model=FAMILY,
        messages=[proxy_pb2.ChatMessage(role="user", parts=[part])],
        sampling=common_pb2.SamplingParams(
            max_tokens=8, temperature=1.0, seed=body_of(question)["seed"], ignore_eos=True
        ),
        return_token_ids=True,
    )
    metadata = [("x-request-id", SAME), ("authorization", f"Bearer {guarded.keys['alice']}")]
    async with contextlib.AsyncExitStack() as stack:
        channel = await stack.enter_async_context(make_channel(guarded.cluster.grpc_address))
        stub = proxy_pb2_grpc.ProxyServiceStub(channel)

        async def over_grpc() -> list[int]:
            call = stub.Chat(request, metadata=metadata, timeout=PATIENCE)
            return [token async for event in call for token in event.token_ids]

        asked = [over_grpc() if number % 2 else ask(web, guarded, "alice", question) for number in range(12)]
        assert await asyncio.gather(*asked) == [answer] * 12

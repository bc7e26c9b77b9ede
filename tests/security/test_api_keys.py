"""Who gets in: keys over HTTP and gRPC, limits per key, and what is open to everybody."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from httpx2 import AsyncClient
from openai import AsyncOpenAI, RateLimitError

from support.channels import connected_channel
from support.fakes.fake_workers import user, whole_text
from support.fakes.proxy_fakes import FakeCluster, as_json, raw_post
from support.waiting import until
from triptych.base.config import check_front_door
from triptych.base.errors import ConfigError
from triptych.protos import proxy_pb2, proxy_pb2_grpc
from triptych.proxy.auth.keys import KeyLimits, KeyRing
from triptych.store.embedding_store import EmbeddingStore

ALICE, BOB, CAROL = "tk-alice-0123456789", "tk-bob-0123456789", "tk-carol-0123456789"
HELLO = json.dumps(
    {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
).encode()


def _line(name: str, key: str, limits: str = "") -> str:
    return f"{name} sha256:{hashlib.sha256(key.encode()).hexdigest()} {limits}\n"


@contextlib.asynccontextmanager
async def _guarded(store: EmbeddingStore, folder: Path) -> AsyncIterator[FakeCluster]:
    """A proxy that asks for keys: Alice one request at once, Bob two in a minute, Carol five tokens."""
    path = folder / "keys"
    path.write_text(
        _line("alice", ALICE, "concurrent-requests=1")
        + _line("bob", BOB, "requests-per-minute=2")
        + _line("carol", CAROL, "tokens-per-minute=5")
    )
    async with FakeCluster(store, keys=KeyRing("", str(path), KeyLimits())) as cluster:
        yield cluster


@pytest.fixture
async def cluster(store: EmbeddingStore, tmp_path: Path) -> AsyncIterator[FakeCluster]:
    async with _guarded(store, tmp_path) as cluster:
        yield cluster


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def _client(cluster: FakeCluster, key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"http://127.0.0.1:{cluster.port}/v1", api_key=key, max_retries=0)


async def _get(cluster: FakeCluster, path: str, **headers: str) -> int:
    """The status of GET `path`, sent as it stands."""
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.port)
    lines = {"Host": "x", "Connection": "close", **headers}
    writer.write(f"GET {path} HTTP/1.1\r\n".encode() + _head(lines))
    await writer.drain()
    status = int((await reader.readline()).split()[1])
    writer.close()
    await writer.wait_closed()
    return status


def _head(lines: dict[str, str]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode() + b"\r\n"


NO_KEY: tuple[dict[str, str], ...] = (
    {},
    {"Authorization": "Bearer tk-mallory-0123456789"},
    {"Authorization": "Bearer "},
    {"Authorization": f"Basic {ALICE}"},
    {"Authorization": ALICE},
    {"Authorization": f"Bearer {ALICE}x"},
    {"Authorization": f"Bearer {ALICE[:-1]}"},
    {"Authorization": "Bearer " + "x" * 30_000},
    {"Authorization": "Bearer \xff\xfe"},
    {"X-Api-Key": f"{ALICE}x"},
    {"X-Api-Key": ALICE, "Authorization": f"Bearer {BOB}"},
)


async def test_without_a_key_that_opens_there_is_a_401_and_no_work(cluster: FakeCluster) -> None:
    for headers in NO_KEY:
        status, answered, body = await raw_post(cluster.port, HELLO, headers)
        assert status == 401, headers
        assert answered["www-authenticate"] == "Bearer"
        error = as_json(body)["error"]
        assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
        assert ALICE[:10] not in body.decode()
    assert cluster.pd_workers[0].submits == []


async def test_a_key_in_anthropics_header_opens_and_errors_have_the_shape_of_the_path(cluster: FakeCluster):
    status, _, _ = await raw_post(cluster.port, HELLO, {"X-Api-Key": ALICE})
    assert status == 200
    async with AsyncClient() as http:
        refused = await http.post(f"http://127.0.0.1:{cluster.port}/v1/messages", content=HELLO)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


async def test_two_authorization_headers_are_none(cluster: FakeCluster):
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.port)
    both = f"Authorization: Bearer guess-0123456789\r\nAuthorization: Bearer {ALICE}\r\n"
    writer.write(f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{both}\r\n".encode())
    assert (await reader.readline()).split()[1] == b"401"
    writer.close()
    await writer.wait_closed()


async def test_only_probes_and_the_pages_files_are_open_whatever_the_spelling_of_the_path(cluster):
    assert await _get(cluster, "/health") == 200
    assert await _get(cluster, "/ready") == 200
    assert [await _get(cluster, path) for path in ("/", "/docs", "/page/app.js")] == [200] * 3
    # What looks like a file of the page is one, or nothing.
    for path in ("/page/../metrics", "/page/..%2fmetrics", "/page/%2e%2e/v1/models", "/page//metrics"):
        assert await _get(cluster, path) == 404, path
    closed = "/metrics /v1/models /openapi.json //health /health/ /Health /cluster /cluster/events"
    closed += " /cluster/requests/x /page // /docs/ //page/app.js /health/../metrics /health/..%2fmetrics"
    closed += " /%2e/metrics /health;/metrics /health%00"
    for path in closed.split():
        assert await _get(cluster, path) == 401, path
    # The host is not part of what decides; a path in it opens nothing.
    assert await _get(cluster, "/metrics", Host="x/health?") in (400, 401)
    assert await _get(cluster, "http://x/health/../metrics") == 401
    assert await _get(cluster, "/metrics", Authorization=f"Bearer {ALICE}") == 200


async def test_a_request_above_the_concurrency_is_429_until_the_reply_has_ended(cluster: FakeCluster):
    async with _client(cluster, ALICE) as alice:
        worker = cluster.pd_workers[0]
        worker.pause_at = 2
        first = asyncio.create_task(raw_post(cluster.port, HELLO, _bearer(ALICE)))
        await until(lambda: cluster.received == 2)
        with pytest.raises(RateLimitError, match="concurrent-requests") as refused:
            await alice.chat.completions.create(model="demo", messages=user("x"))
        assert refused.value.response.headers["retry-after"] == "1"
        assert refused.value.code == "rate_limit_exceeded"
        # Others are not touched by it.
        worker.pause_at = None
        second = asyncio.create_task(raw_post(cluster.port, HELLO, _bearer(BOB)))
        await until(lambda: len(worker.submits) == 2)
        worker.gate.set()
        assert (await first)[0] == (await second)[0] == 200
        assert (await raw_post(cluster.port, HELLO, _bearer(ALICE)))[0] == 200


async def test_a_client_that_vanishes_and_a_bad_request_give_their_place_back(cluster: FakeCluster):
    worker = cluster.pd_workers[0]
    worker.pause_at = 2
    _, writer = await asyncio.open_connection("127.0.0.1", cluster.port)
    head = {"Host": "x", "Content-Length": str(len(HELLO)), **_bearer(ALICE)}
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\n" + _head(head) + HELLO)
    await until(lambda: cluster.received == 2)
    writer.close()
    await until(lambda: cluster.dispatcher.in_flight == 0)
    worker.pause_at = None
    worker.gate.set()

    async def served() -> int:
        return (await raw_post(cluster.port, HELLO, _bearer(ALICE)))[0]

    async with asyncio.timeout(45):
        while await served() != 200:
            await asyncio.sleep(0.01)
    assert (await raw_post(cluster.port, b"{", _bearer(ALICE)))[0] == 400
    assert await served() == 200


async def test_requests_above_the_rate_are_429_with_the_time_to_wait(cluster: FakeCluster):
    for _ in range(2):
        assert (await raw_post(cluster.port, HELLO, _bearer(BOB)))[0] == 200
    status, headers, body = await raw_post(cluster.port, HELLO, _bearer(BOB))
    error = as_json(body)["error"]
    assert (status, error["type"]) == (429, "rate_limit_error")
    assert error["message"].startswith("requests-per-minute: ")
    assert 50 < int(headers["retry-after"]) <= 60
    assert (await raw_post(cluster.port, HELLO, _bearer(ALICE)))[0] == 200
    assert cluster.metrics.registry.get_sample_value(
        "triptych_refusals_total", {"reason": "requests-per-minute"}
    )


async def test_gets_and_unary_calls_count_towards_the_minute_and_probes_and_reflection_do_not(cluster):
    async with connected_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        stub = proxy_pb2_grpc.ProxyServiceStub(channel)
        metadata = (("authorization", f"Bearer {BOB}"),)
        for path in ("/health", "/ready", "/docs"):
            assert await _get(cluster, path, **_bearer(BOB)) == 200
        assert await _get(cluster, "/v1/models", **_bearer(BOB)) == 200
        await stub.ListModels(proxy_pb2.ListModelsRequest(), metadata=metadata, timeout=20)
        assert await _get(cluster, "/v1/models", **_bearer(BOB)) == 429
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ListModels(proxy_pb2.ListModelsRequest(), metadata=metadata, timeout=20)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await raw_post(cluster.port, HELLO, _bearer(BOB)))[0] == 429
        assert await _get(cluster, "/v1/models", **_bearer(ALICE)) == 200


async def test_gets_are_answered_while_a_key_has_no_place_and_no_token_left(cluster: FakeCluster):
    cluster.pd_workers[0].pause_at = 1
    asked = asyncio.create_task(raw_post(cluster.port, HELLO, _bearer(ALICE)))
    await until(lambda: cluster.pd_workers[0].requests)
    assert await _get(cluster, "/v1/models", **_bearer(ALICE)) == 200
    cluster.pd_workers[0].pause_at = None
    cluster.pd_workers[0].gate.set()
    assert (await asked)[0] == 200
    assert (await raw_post(cluster.port, HELLO, _bearer(CAROL)))[0] == 200
    assert (await raw_post(cluster.port, HELLO, _bearer(CAROL)))[0] == 429
    assert await _get(cluster, "/v1/models", **_bearer(CAROL)) == 200


async def test_tokens_of_a_reply_count_against_its_key(cluster: FakeCluster):
    assert (await raw_post(cluster.port, HELLO, _bearer(CAROL)))[0] == 200
    status, _, body = await raw_post(cluster.port, HELLO, _bearer(CAROL))
    assert status == 429
    assert as_json(body)["error"]["message"].startswith("tokens-per-minute: ")


async def _chat(channel: Any, **metadata: str) -> str:
    stub = proxy_pb2_grpc.ProxyServiceStub(channel)
    message = proxy_pb2.ChatMessage(role="user", parts=[proxy_pb2.ChatPart(text="x")])
    request = proxy_pb2.ChatRequest(messages=[message])
    request.sampling.max_tokens = 4
    call = stub.Chat(request, metadata=tuple(metadata.items()), timeout=20)
    return "".join([event.text async for event in call])


async def test_grpc_asks_for_the_same_keys(cluster: FakeCluster):
    async with connected_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        assert await _chat(channel, authorization=f"Bearer {BOB}") == whole_text(4)
        for wrong in ({}, {"authorization": "Bearer tk-mallory-0123456789"}, {"authorization": BOB}):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await _chat(channel, **wrong)
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        stub = proxy_pb2_grpc.ProxyServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.ListModels(proxy_pb2.ListModelsRequest(), timeout=20)
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
        key = (("authorization", f"Bearer {BOB}"),)
        reply = await stub.ListModels(proxy_pb2.ListModelsRequest(), metadata=key, timeout=20)
        assert list(reply.models) == ["demo"]


async def test_http_and_grpc_count_together(cluster: FakeCluster):
    async with connected_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        assert (await raw_post(cluster.port, HELLO, _bearer(BOB)))[0] == 200
        assert await _chat(channel, authorization=f"Bearer {BOB}") == whole_text(4)
        with pytest.raises(grpc.aio.AioRpcError, match="requests-per-minute") as error:
            await _chat(channel, authorization=f"Bearer {BOB}")
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 50 < int(dict(error.value.trailing_metadata())["retry-after"]) <= 60


async def test_a_grpc_call_that_is_cancelled_gives_its_place_back(cluster: FakeCluster):
    async with connected_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        cluster.pd_workers[0].pause_at = 2
        first = asyncio.create_task(_chat(channel, authorization=f"Bearer {ALICE}"))
        await until(lambda: cluster.received == 2)
        first.cancel()
        await until(lambda: cluster.dispatcher.in_flight == 0)
        cluster.pd_workers[0].pause_at = None
        cluster.pd_workers[0].gate.set()
        async with asyncio.timeout(45):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    assert await _chat(channel, authorization=f"Bearer {ALICE}") == whole_text(4)
                    return


async def test_the_tenant_of_a_request_is_its_keys_name(cluster: FakeCluster):
    async with connected_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        await raw_post(cluster.port, HELLO, _bearer(ALICE))
        await raw_post(cluster.port, HELLO, _bearer(CAROL))
        await _chat(channel, authorization=f"Bearer {ALICE}")
        salts = [submit.salt for submit in cluster.pd_workers[0].submits]
        assert salts == ["\x005:alice", "\x005:carol", "\x005:alice"]


async def test_no_key_is_ever_written_to_the_log(store, tmp_path, caplog):
    caplog.set_level(logging.DEBUG)
    async with _guarded(store, tmp_path) as cluster:
        for key in (ALICE, BOB, BOB, BOB, "tk-mallory-0123456789"):
            await raw_post(cluster.port, HELLO, _bearer(key))
    assert "requests-per-minute" in caplog.text
    assert "tenant bob" in caplog.text
    for key in (ALICE, BOB, "tk-mallory-0123456789"):
        assert key not in caplog.text


@pytest.mark.parametrize("path", ["--api-key-file", "both"])
def test_no_auth_and_keys_contradict_each_other(path):
    with pytest.raises(ConfigError, match="--no-auth"):
        check_front_door(
            "127.0.0.1", api_key="k" * 16 if path == "both" else "", api_key_file=path, auth=False
        )

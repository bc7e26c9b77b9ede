"""Fields that the server does not know, and refusals: named, counted, logged."""

from __future__ import annotations

import json
import logging
from typing import Any

import grpc
import pytest

from support.channels import connected_channel
from support.fakes.proxy_fakes import FakeCluster
from triptych.protos import proxy_pb2, proxy_pb2_grpc
from triptych.store.embedding_store import EmbeddingStore

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
CHAT = "/v1/chat/completions"


def counted(cluster: FakeCluster) -> dict[tuple[str, str], float]:
    """The requests that have ended, by status and route."""
    return {
        (sample.labels["status"], sample.labels["route"]): sample.value
        for family in cluster.metrics.requests.collect()
        for sample in family.samples
    }


async def send(cluster: FakeCluster, method: str, path: str, **given: Any) -> int:
    reply = await cluster.client._client.request(method, f"http://127.0.0.1:{cluster.port}{path}", **given)
    return int(reply.status_code)


async def test_every_refusal_is_counted_by_status_and_route(cluster: FakeCluster) -> None:
    assert await send(cluster, "POST", CHAT, json={**HELLO, "model": "renamed"}) == 404
    assert await send(cluster, "POST", CHAT, json={**HELLO, "model": "renamed too"}) == 404
    assert await send(cluster, "POST", CHAT, json={"messages": "x"}) == 400
    assert await send(cluster, "POST", CHAT, content=b"x" * (2 << 20)) == 413
    assert await send(cluster, "GET", CHAT) == 405
    for path in ("/v1/moderations", "/admin", "/%00"):
        assert await send(cluster, "POST", path, json={}) == 404
    assert await send(cluster, "GET", "/v1/models/renamed") == 404
    assert await send(cluster, "POST", CHAT, json={**HELLO, "max_tokens": 3}) == 200
    assert await send(cluster, "GET", "/v1/models") == 200
    assert counted(cluster) == {
        ("404", CHAT): 2,
        ("400", CHAT): 1,
        ("413", CHAT): 1,
        ("405", CHAT): 1,
        ("404", "other"): 3,
        ("404", "/v1/models/{model:path}"): 1,
        ("200", CHAT): 1,
    }


async def test_a_refused_call_of_grpc_is_counted_by_its_method(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster, connected_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        stub = proxy_pb2_grpc.ProxyServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in stub.Chat(proxy_pb2.ChatRequest(model="renamed")):
                pass
        assert list(counted(cluster).values()) == [1]
        assert {route for _, route in counted(cluster)} == {"/triptych.v1.ProxyService/Chat"}


async def test_refusals_are_in_the_log_and_on_the_page_and_hold_no_line_of_a_client(store, caplog):
    async with FakeCluster(store, live=True) as cluster:
        source = "triptych.proxy.http.refusals"
        with caplog.at_level(logging.INFO, logger=source):
            for _ in range(50):
                assert await send(cluster, "POST", CHAT, json={**HELLO, "model": "renamed"}) == 404
        lines = [record.message for record in caplog.records if record.name == "triptych.proxy.http.refusals"]
        assert lines == [f"{CHAT} refused with 404: model_not_found"]
        reply = await cluster.client._client.get(f"http://127.0.0.1:{cluster.port}/cluster")
        [row] = reply.json()["failures"]
        assert row["what"] == f"requests to {CHAT} are refused with 404"
        assert row["count"] == 50
        assert "named" not in str(row)


ASKED = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
HEADER = "x-triptych-ignored-fields"


async def post(cluster: FakeCluster, path: str, **given: Any) -> Any:
    return await cluster.client._client.post(f"http://127.0.0.1:{cluster.port}{path}", **given)


KNOWN: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", ASKED),
    ("/v1/chat/completions", {**ASKED, "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 100_000}], "max_tokens": 3}),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 3}),
    ("/v1/responses", {"input": "hello"}),
    ("/v1/messages", ASKED),
    ("/v1/messages/count_tokens", {"messages": ASKED["messages"], "system": "x"}),
    ("/tokenize", {"prompt": "hello"}),
    ("/detokenize", {"tokens": [1]}),
]


def misspelt(body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A field of the body, and the body with that one misspelt and another that changes nothing."""
    name = next(name for name in body if name in ("max_tokens", "input", "prompt", "tokens", "system"))
    return name, {**body, name[:-1] + "x": 5, "service_tier": "x"}


async def test_ignored_fields_are_named_in_a_header(cluster: FakeCluster) -> None:
    for path, body in KNOWN:
        strange = {**body, "mirostat_eta": 1, "service_tier": "x"}
        plain, ignored = await post(cluster, path, json=body), await post(cluster, path, json=strange)
        assert (plain.status_code, ignored.status_code) == (200, 200)
        assert HEADER not in plain.headers
        assert ignored.headers[HEADER] == "mirostat_eta, service_tier"


async def test_a_misspelt_field_is_refused_and_the_known_one_named(cluster: FakeCluster) -> None:
    for path, body in KNOWN:
        name, wrong = misspelt(body)
        refused = await post(cluster, path, json=wrong)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, name[:-1] + "x")
        assert f"did you mean {name}?" in error["message"]


async def test_unknown_fields_are_refused_where_the_operator_wants_it(store: EmbeddingStore) -> None:
    async with FakeCluster(store, unknown_fields="reject") as cluster:
        for path, body in KNOWN:
            assert (await post(cluster, path, json={**body, "service_tier": "x"})).status_code == 200
            refused = await post(cluster, path, json={**body, "mirostat_eta": 1})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "mirostat_eta")
            assert "leave it out (--unknown-fields)" in error["message"]


async def test_the_header_is_short_and_of_plain_characters_whatever_a_client_sends(store):
    names = ["a\r\nset-cookie: x", "ü" * 300, *(f"field_{index}" for index in range(5000))]
    async with FakeCluster(store) as cluster:
        body = json.dumps({**ASKED, **dict.fromkeys(names, 1)})
        reply = await post(cluster, "/v1/chat/completions", content=body)
        assert reply.status_code == 200
        shown = reply.headers[HEADER]
        assert len(shown) <= 512 and shown.startswith("a??set-cookie:?x, ???")
        assert "set-cookie" not in reply.headers

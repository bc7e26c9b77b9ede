"""Fields that the server does not know: named in a header of the reply, or refused on the operator's wish."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.fakes.proxy_fakes import FakeCluster
from triptych.store.embedding_store import EmbeddingStore

HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
HEADER = "x-triptych-ignored-fields"


async def post(cluster: FakeCluster, path: str, **given: Any) -> Any:
    return await cluster.client._client.post(f"http://127.0.0.1:{cluster.port}{path}", **given)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", HELLO),
        ("/v1/chat/completions", {**HELLO, "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 100_000}], "max_tokens": 3}),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 3}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", HELLO),
        ("/v1/messages/count_tokens", {"messages": HELLO["messages"], "system": "x"}),
        ("/tokenize", {"prompt": "hello"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
async def test_ignored_fields_are_named_in_a_header_and_refused_where_the_operator_wants_it(
    store: EmbeddingStore, path: str, body: dict[str, Any]
) -> None:
    known = next(name for name in body if name in ("max_tokens", "input", "prompt", "tokens", "system"))
    misspelt = {**body, known[:-1] + "x": 5, "service_tier": "x"}
    async with FakeCluster(store) as cluster:
        plain, ignored = await post(cluster, path, json=body), await post(cluster, path, json=misspelt)
        assert (plain.status_code, ignored.status_code) == (200, 200)
        assert HEADER not in plain.headers
        assert ignored.headers[HEADER] == f"{known[:-1]}x, service_tier"
    async with FakeCluster(store, unknown_fields="reject") as cluster:
        assert (await post(cluster, path, json={**body, "service_tier": "x"})).status_code == 200
        refused = await post(cluster, path, json=misspelt)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, known[:-1] + "x")
        assert f"did you mean {known}?" in error["message"]


async def test_the_header_is_short_and_of_plain_characters_whatever_a_client_sends(store):
    names = ["a\r\nset-cookie: x", "ü" * 300, *(f"field_{index}" for index in range(5000))]
    async with FakeCluster(store) as cluster:
        body = json.dumps({**HELLO, **dict.fromkeys(names, 1)})
        reply = await post(cluster, "/v1/chat/completions", content=body)
        assert reply.status_code == 200
        shown = reply.headers[HEADER]
        assert len(shown) <= 512 and shown.startswith("a??set-cookie:?x, ???")
        assert "set-cookie" not in reply.headers

from __future__ import annotations

import json

from support.fakes.proxy_fakes import FakeCluster, raw_post
from triptych.store.embedding_store import EmbeddingStore

HELLO = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


async def test_a_sane_request_id_goes_all_the_way_and_another_is_replaced(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster:
        body = json.dumps(HELLO).encode()
        _, headers, _ = await raw_post(cluster.port, body, {"X-Request-Id": "my-id.7"})
        assert headers["x-request-id"] == "my-id.7"
        _, headers, _ = await raw_post(cluster.port, body, {"X-Request-Id": "bad id; rm"})
        submits = cluster.pd_workers[0].submits
        assert [submit.label for submit in submits] == ["my-id.7", headers["x-request-id"]]
        assert not {submit.request_id for submit in submits} & {submit.label for submit in submits}
        assert headers["x-request-id"] != "bad id; rm"


async def test_unknown_paths_and_methods_are_answered_in_openais_shape(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster:
        client = cluster.client._client
        missing = await client.get(f"http://127.0.0.1:{cluster.port}/v1/nothing")
        wrong = await client.get(f"http://127.0.0.1:{cluster.port}/v1/chat/completions")
        assert (missing.status_code, wrong.status_code) == (404, 405)
        assert missing.json()["error"]["message"] == "GET /v1/nothing is not served here"
        assert wrong.json()["error"]["message"].endswith("is not served here: use POST")
        for path in ("/chat/completions", "/v1/chat/completion", "/api/v1/chat/completions/"):
            near = await client.post(f"http://127.0.0.1:{cluster.port}{path}")
            assert near.json()["error"]["message"].endswith("; did you mean /v1/chat/completions?")

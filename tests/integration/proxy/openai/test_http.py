from __future__ import annotations

import asyncio
import json

from support.fakes.fake_workers import whole_text
from support.fakes.proxy_fakes import FakeCluster, as_json, raw_post
from support.waiting import until
from triptych.store.embedding_store import EmbeddingStore

HELLO = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


async def test_a_body_above_the_limit_is_413_before_it_is_read(store: EmbeddingStore) -> None:
    async with FakeCluster(store, max_body=10_000) as cluster:
        status, _, body = await raw_post(cluster.port, b"x" * 20_000)
        assert status == 413
        assert as_json(body)["error"]["param"] == "body"


async def test_a_body_that_grows_above_the_limit_in_chunks_is_413(store: EmbeddingStore) -> None:
    async with FakeCluster(store, max_body=10_000) as cluster:
        reader, writer = await asyncio.open_connection("127.0.0.1", cluster.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(4):
            writer.write(b"1000\r\n" + b"x" * 0x1000 + b"\r\n")
        await writer.drain()
        assert (await reader.readline()).split()[1] == b"413"
        writer.close()
        await writer.wait_closed()


async def test_bad_base64_is_a_400_that_names_its_field(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster:
        parts = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}}]
        body = {**HELLO, "messages": [{"role": "user", "content": parts}]}
        status, _, raw = await raw_post(cluster.port, json.dumps(body).encode())
        assert (status, as_json(raw)["error"]["param"]) == (400, "messages[0].content[0].image_url.url")
        await cluster.at_rest()


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


async def test_a_slow_reader_gets_everything(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster:
        body = json.dumps({**HELLO, "max_tokens": 3000, "stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", cluster.port, limit=4096)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await until(lambda: cluster.dispatcher.in_flight == 1)
        await until(lambda: not cluster.pd_workers[0].requests and cluster.pd_workers[0].submits)
        raw = b""
        while b"[DONE]" not in raw[-64:]:
            raw += await reader.read(4096)
        texts = [
            json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            for line in raw.decode().splitlines()
            if line.startswith("data: {")
        ]
        assert "".join(texts) == whole_text(3000)
        writer.close()
        await writer.wait_closed()

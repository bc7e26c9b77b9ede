from __future__ import annotations

import asyncio
import json
import random

from support.fakes.fake_workers import data_url, picture, whole_text
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


async def test_an_unknown_model_is_404_and_names_the_known_ones(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster:
        status, _, body = await raw_post(cluster.port, json.dumps({**HELLO, "model": "gpt-9"}).encode())
        error = as_json(body)["error"]
        assert (status, error["param"], error["code"]) == (404, "model", "not_found")
        assert "demo" in error["message"]


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


async def test_two_requests_at_once_may_carry_the_same_id(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster:
        body = json.dumps(HELLO).encode()
        asked = [raw_post(cluster.port, body, {"X-Request-Id": "same"}) for _ in range(4)]
        assert [status for status, _, _ in await asyncio.gather(*asked)] == [200] * 4


async def test_unknown_paths_and_methods_are_answered_in_openais_shape(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster:
        client = cluster.client._client
        missing = await client.get(f"http://127.0.0.1:{cluster.port}/v1/nothing")
        wrong = await client.get(f"http://127.0.0.1:{cluster.port}/v1/chat/completions")
        assert (missing.status_code, wrong.status_code) == (404, 405)
        assert missing.json()["error"]["message"]


async def test_health_and_metrics_are_served(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster:
        await cluster.stream([{"role": "user", "content": "x"}])
        client = cluster.client._client
        assert (await client.get(f"http://127.0.0.1:{cluster.port}/health")).json() == {"status": "ok"}
        text = (await client.get(f"http://127.0.0.1:{cluster.port}/metrics")).text
        assert 'triptych_requests_total{route="/v1/chat/completions",status="200"} 1.0' in text
        assert "triptych_requests_in_flight 0.0" in text


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


async def test_two_hundred_malformed_requests_leave_a_proxy_that_works(store: EmbeddingStore) -> None:
    rng = random.Random(7)
    good = {
        "model": "demo",
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(picture("p"))}}]}
        ],
    }
    async with FakeCluster(store) as cluster:
        for _ in range(200):
            status, _, body = await raw_post(cluster.port, _spoilt(good, rng))
            error = as_json(body)["error"]
            assert 400 <= status < 500
            assert error["param"]
            assert error["message"]
        assert cluster.jobs == []
        await cluster.at_rest()
        assert await cluster.stream([{"role": "user", "content": "x"}]) == whole_text(8)


def _spoilt(good: dict[str, object], rng: random.Random) -> bytes:
    """The good request with one thing wrong."""
    body = json.loads(json.dumps(good))
    message = body["messages"][0]
    url = message["content"][0]["image_url"]
    wrong = rng.choice([None, [], {}, "x", -7, 1.5, True])
    spoilers = [
        lambda: body.pop("messages"),
        lambda: body.update(messages=rng.choice([None, 5, "x", {}, []])),
        lambda: body.update(model=rng.choice(["none", 5, [], {}])),
        lambda: message.update(role=rng.choice([None, 5, "robot", "", []])),
        lambda: message.pop("role"),
        lambda: message.update(content=rng.choice([None, 5, {}, [], True])),
        lambda: message["content"].append(wrong),
        lambda: message["content"].append({"type": rng.choice(["audio", None, 5])}),
        lambda: url.pop("url"),
        lambda: url.update(url=rng.choice(["http://a/b", "file:///x", "x", "", 5, None, "data:,x"])),
        lambda: url.update(url="data:image/png;base64," + rng.choice(["@", "A", "AA=A", "A===", ""])),
        lambda: url.update(url="data:application/pdf;base64,AAAA"),
        lambda: body.update(temperature=rng.choice([-1, 3, "x", [], True])),
        lambda: body.update(top_p=rng.choice([0, -1, 1.1, "x"])),
        lambda: body.update(top_k=rng.choice([-5, 1.5, "x"])),
        lambda: body.update(max_tokens=rng.choice([0, -1, "x", 1 << 40])),
        lambda: body.update(min_tokens=9, max_tokens=3),
        lambda: body.update(stop=rng.choice([5, [""], ["x"] * 20, {}])),
        lambda: body.update(seed=rng.choice([1 << 64, "x", 0.5])),
        lambda: body.update(n=rng.choice([0, 17, -1, "x"])),
        lambda: body.update(logprobs=rng.choice([1, "x", []])),
        lambda: body.update(cache_salt=rng.choice(["x" * 300, "\u0000", 5])),
        lambda: body.update(mm_processor_kwargs=rng.choice([5, [], "x"])),
        lambda: message["content"].extend([message["content"][0]] * 20),
    ]
    rng.choice(spoilers)()
    raw = json.dumps(body).encode()
    return raw[: rng.randrange(1, len(raw))] if rng.random() < 0.1 else raw

"""Chat beside other calls, and beside clients that stop reading."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import Counter

import httpx2
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from support.fakes.fake_workers import MODEL, user, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.proxy.http import endpoint
from triptych.proxy.openai import app
from triptych.proxy.openai.app import MetricsPage
from triptych.store.embedding_store import EmbeddingStore

CLIENTS = 30
QUESTIONS = {
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [104, 105]},
    "/v1/completions": {"model": "demo", "prompt": [104, 105], "echo": True, "max_tokens": 2},
}
#: Endpoints that no worker is asked for, and those that generate.
OTHERS = ("/v1/models", "/metrics", "/ready")


def client(cluster: FakeCluster) -> httpx2.AsyncClient:
    limits = httpx2.Limits(max_connections=CLIENTS + 1)
    return httpx2.AsyncClient(base_url=f"http://127.0.0.1:{cluster.port}", timeout=60.0, limits=limits)


@pytest.mark.parametrize("path", QUESTIONS)
async def test_chat_is_answered_while_questions_to_workers_are_not(store: EmbeddingStore, path: str) -> None:
    async with FakeCluster(store) as cluster, client(cluster) as asker:
        worker = cluster.pd_workers[0]
        worker.answering.clear()
        asking = [asyncio.create_task(asker.post(path, json=QUESTIONS[path])) for _ in range(CLIENTS)]
        await until(lambda: worker.asking >= 8)
        for _ in range(5):
            reply = await cluster.ask(user("x"), max_tokens=4)
            assert reply.choices[0].message.content == whole_text(4)
        assert not any(task.done() for task in asking)
        worker.answering.set()
        assert Counter(reply.status_code for reply in await asyncio.gather(*asking)) == {200: CLIENTS}
        await cluster.at_rest()


async def test_questions_pass_the_gate(store: EmbeddingStore) -> None:
    async with FakeCluster(store, max_queue=3) as cluster, client(cluster) as asker:
        worker = cluster.pd_workers[0]
        worker.answering.clear()
        asking = [asyncio.create_task(asker.post("/tokenize", json={"prompt": "x"})) for _ in range(3)]
        await until(lambda: worker.asking == 3)
        refused = await asker.post("/detokenize", json={"tokens": [104]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        # Chat has a queue of its own.
        assert (await cluster.ask(user("x"))).choices[0].message.content
        worker.answering.set()
        assert {reply.status_code for reply in await asyncio.gather(*asking)} == {200}
        cluster.dispatcher.drain()
        assert (await asker.post("/tokenize", json={"prompt": "x"})).status_code == 503


async def test_a_question_whose_client_has_gone_gives_its_turn_back(store: EmbeddingStore) -> None:
    async with FakeCluster(store) as cluster, client(cluster) as asker:
        worker = cluster.pd_workers[0]
        worker.answering.clear()
        asking = [asyncio.create_task(asker.post("/tokenize", json={"prompt": "x"})) for _ in range(CLIENTS)]
        await until(lambda: worker.asking == 8)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        worker.answering.set()
        assert (await asker.post("/tokenize", json={"prompt": "x"})).json()["count"] == 1


@pytest.mark.parametrize("path", OTHERS)
async def test_chat_is_answered_within_one_round_of_every_other_endpoint(store, path):
    """They ask again and again: while chat is answered, each gets its turns and no more."""
    async with FakeCluster(store) as cluster, client(cluster) as asker:
        assert (await asker.get(path)).status_code == 200
        rounds = Counter[int]()
        over = asyncio.Event()

        async def ask(index: int) -> None:
            while not over.is_set():
                assert (await asker.get(path)).status_code == 200
                rounds[index] += 1

        asking = [asyncio.create_task(ask(index)) for index in range(CLIENTS)]
        await until(lambda: len(rounds) == CLIENTS)
        before = max(rounds.values())
        reply = await cluster.ask(user("x"), max_tokens=4)
        after = max(rounds.values())
        over.set()
        await asyncio.gather(*asking)
        assert reply.choices[0].message.content == whole_text(4)
        assert after - before <= 40, "chat waits for its turn at every event, at each behind all others"


async def test_metrics_are_made_once_for_all_who_ask_meanwhile_and_are_never_old(store, monkeypatch):
    made: list[CollectorRegistry] = []
    may_end = threading.Event()

    def slow(registry: CollectorRegistry) -> bytes:
        made.append(registry)
        assert may_end.wait(20)
        return generate_latest(registry)

    asked: list[MetricsPage] = []
    text = MetricsPage.text

    async def counted(page: MetricsPage) -> bytes:
        asked.append(page)
        return await text(page)

    monkeypatch.setattr(app, "generate_latest", slow)
    monkeypatch.setattr(MetricsPage, "text", counted)
    async with FakeCluster(store) as cluster, client(cluster) as asker:
        asking = [asyncio.create_task(asker.get("/metrics")) for _ in range(CLIENTS)]
        await until(lambda: len(asked) == CLIENTS)
        # Chat is answered meanwhile, and counts in the text that is made after it.
        assert (await cluster.ask(user("x"), max_tokens=4)).choices[0].message.content == whole_text(4)
        late = asyncio.create_task(asker.get("/metrics"))
        await until(lambda: len(asked) == CLIENTS + 1)
        assert len(made) == 1
        may_end.set()
        assert 'triptych_requests_total{route="/v1/chat/completions",status="200"} 1.0' in (await late).text
        assert {reply.status_code for reply in await asyncio.gather(*asking)} == {200}
        assert len(made) == 2


#: Far more than the buffers of a connection hold.
FLOOD = ["x" * (256 << 10)] * 60


async def test_a_client_that_stops_reading_its_stream_loses_it_and_nobody_else_theirs(store, monkeypatch):
    monkeypatch.setattr(endpoint, "WRITE_SECONDS", 0.5)
    async with FakeCluster(store) as cluster:
        pd = cluster.pd_workers[0]
        pd.script = [*FLOOD, "end"]
        pd.pause_at = len(FLOOD)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", cluster.port))
            await loop.sock_sendall(client, _post({"max_tokens": 1000, "stream": True}))
            assert (await loop.sock_recv(client, 64)).startswith(b"HTTP/1.1 200")
            await until(lambda: pd.cancels, "the PD worker is told")
            assert not pd.requests
            pd.script, pd.pause_at = None, None
            pd.gate.set()
            assert await cluster.stream(user("count")) == whole_text(8)
        await cluster.at_rest()


def _post(extra: dict[str, object], *, close: bool = False) -> bytes:
    body = json.dumps({"model": MODEL, "messages": user("flood")} | extra).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + ("Connection: close\r\n" if close else "")
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

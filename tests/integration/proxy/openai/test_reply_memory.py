"""Replies that nobody reads: what they hold is counted, bounded and given back; whoever reads gets all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

from support.fakes.fake_workers import MODEL, user, whole_text
from support.fakes.proxy_fakes import FakeCluster, raw_post
from support.waiting import until
from triptych.base.errors import Overloaded
from triptych.proxy import dispatcher
from triptych.proxy.auth.keys import KeyLimits, KeyRing
from triptych.proxy.http.connections import ConnectionLimits
from triptych.proxy.requests.output_queue import UNPAUSED
from triptych.store.embedding_store import EmbeddingStore

LAST = b"[DONE]\n\n\r\n0\r\n\r\n"
KIB, MIB = 1 << 10, 1 << 20
KEYS = "tk-silent-0123456789", "tk-other-0123456789"
SILENT, OTHER = ({"Authorization": f"Bearer {key}"} for key in KEYS)
RICH: dict[str, Any] = {"logprobs": True, "top_logprobs": 20, "stream": True}


def post(extra: dict[str, Any], headers: dict[str, str] | None = None) -> bytes:
    body = json.dumps({"model": MODEL, "messages": user("x")} | extra).encode()
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@contextlib.contextmanager
def client() -> Iterator[socket.socket]:
    """One whose system holds next to nothing for it."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        # Segments that fit: those of loopback would come in one probe of the kernel after another.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1000)
        connection.setblocking(False)
        yield connection


async def send(connection: socket.socket, port: int, request: bytes) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, ("127.0.0.1", port))
    await loop.sock_sendall(connection, request)


async def read_until(connection: socket.socket, end: bytes) -> bytes:
    loop, data = asyncio.get_running_loop(), bytearray()
    while not data.endswith(end) and (part := await loop.sock_recv(connection, 1 << 20)):
        data += part
    return bytes(data)


def texts_of(stream: bytes) -> dict[int, str]:
    """The text of every choice."""
    texts: dict[int, str] = {}
    for chunk in [json.loads(line[6:]) for line in stream.split(b"\n") if line.startswith(b"data: {")]:
        assert "choices" in chunk, chunk
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"].get("content", "")
    return texts


async def ask_other(cluster: FakeCluster) -> int:
    body = json.dumps({"model": MODEL, "messages": user("x"), "max_tokens": 4}).encode()
    return (await raw_post(cluster.port, body, OTHER))[0]


def keys() -> KeyRing:
    return KeyRing(",".join(KEYS), "", KeyLimits())


async def test_unread_streams_are_held_back_at_the_pd_worker_and_go_on_when_they_are_read(store):
    async with (
        FakeCluster(store, keys=keys(), reply_memory=2 * MIB, request_timeout=60.0) as cluster,
        contextlib.AsyncExitStack() as stack,
    ):
        pd, replies = cluster.pd_workers[0], cluster.quotas["replies"]
        pd.pace, pd.script = 0.01, [f"{index:06}" + "y" * (16 * KIB) for index in range(40)]
        # None has ended when the worker hears that it is to pause.
        pd.pause_at = 30
        clients = [stack.enter_context(client()) for _ in range(4)]
        for connection in clients:
            await send(connection, cluster.port, post(RICH | {"max_tokens": 40, "n": 4}, SILENT))
        await until(lambda: len(set(pd.paused)) == 16, "all choices are paused")
        assert replies.used <= MIB
        assert all(len(pd.requests[name].events) < 40 for name in pd.paused)
        pd.pause_at = None
        pd.gate.set()
        assert await ask_other(cluster) == 200
        for connection in clients:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MIB)
        # All at once: one that nobody reads meanwhile would end by the least pace of readers.
        for data in await asyncio.gather(*[read_until(connection, LAST) for connection in clients]):
            assert texts_of(data) == dict.fromkeys(range(4), "".join(pd.script))
        await cluster.at_rest()
        assert replies.used == 0


async def test_a_reply_in_one_piece_above_the_memory_ends_and_leaves_the_others_theirs(store):
    async with FakeCluster(store, keys=keys(), reply_memory=2 * MIB, request_timeout=50.0) as cluster:
        body = json.dumps(
            {"model": MODEL, "messages": user("x"), "max_tokens": 1000, "n": 4} | RICH | {"stream": False}
        ).encode()
        status, headers, reply = await raw_post(cluster.port, body, SILENT)
        assert (status, headers["retry-after"]) == (429, "2")
        assert b"--reply-memory" in reply
        assert await ask_other(cluster) == 200
        await cluster.at_rest()
        assert cluster.quotas["replies"].used == 0


async def test_a_call_counts_until_its_client_has_the_reply_or_has_gone(store: EmbeddingStore) -> None:
    async with FakeCluster(store, max_queue=1) as cluster:
        cluster.pd_workers[0].script = ["x" * (8 * MIB)]
        with client() as unread, client() as read:
            await send(unread, cluster.port, post({"max_tokens": 1}))
            await until(
                lambda: cluster.dispatcher.with_logprobs == set() and not cluster.pd_workers[0].requests
            )
            await until(lambda: cluster.quotas["replies"].used > 4 * MIB, "the reply is on its way")
            assert (await raw_post(cluster.port, post({}).split(b"\r\n\r\n")[1]))[0] == 429
            unread.close()
            await cluster.at_rest()
            await send(read, cluster.port, post({"max_tokens": 1}))
            await read_until(read, b"}}")
            await cluster.at_rest()
        assert cluster.quotas["replies"].used == 0


async def test_a_reader_above_the_least_rate_is_not_cut_and_one_that_reads_nothing_is(store):
    limits = ConnectionLimits(window_seconds=2.0, min_bytes=16 * KIB, sweep_seconds=0.05)
    async with FakeCluster(store, connections=limits) as cluster:
        pd = cluster.pd_workers[0]
        pd.script = ["x" * (64 * KIB)] * 20
        loop = asyncio.get_running_loop()
        with client() as slow, client() as silent:
            for connection in (slow, silent):
                await send(connection, cluster.port, post({"max_tokens": 20, "stream": True}))
            received = 0
            while received < 20 * 64 * KIB:
                part = await loop.sock_recv(slow, 16 * KIB)
                assert part, "the slow reader was cut"
                received += part.count(b"x")
                await asyncio.sleep(0.005)
            await until(lambda: len(cluster.http.server_state.connections) == 1, "the silent one is cut")
        await cluster.at_rest()


async def test_a_worker_that_cannot_pause_has_its_unread_request_ended(cluster: FakeCluster) -> None:
    pd, replies = cluster.pd_workers[0], cluster.quotas["replies"]
    pd.can_pause, pd.script = False, ["x" * (256 * KIB)] * 200
    with client() as silent:
        await send(silent, cluster.port, post(RICH | {"max_tokens": 200}))
        await until(lambda: pd.cancels, "the request is cancelled")
        assert replies.used <= UNPAUSED
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MIB)
        data = await read_until(silent, b"0\r\n\r\n")
    assert b"the client does not read" in data


async def test_a_paused_request_whose_worker_dies_goes_on_elsewhere_and_pauses_there(store):
    async with FakeCluster(store, pd_workers=2) as cluster:
        for worker in cluster.pd_workers:
            worker.pace, worker.pause_at = 0.005, 70
            worker.script = [f"{index:06}" + "y" * (64 * KIB) for index in range(100)]
        with client() as silent:
            await send(silent, cluster.port, post(RICH | {"max_tokens": 100, "n": 2}))
            await until(lambda: sum(len(w.paused) for w in cluster.pd_workers) >= 2)
            first = next(worker for worker in cluster.pd_workers if worker.paused)
            other = next(worker for worker in cluster.pd_workers if worker is not first)
            await first.kill()
            await until(lambda: len(set(other.paused)) == 2, "it is paused at the other one")
            other.pause_at = None
            other.gate.set()
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MIB)
            data = await read_until(silent, LAST)
        assert texts_of(data) == dict.fromkeys(range(2), "".join(first.script or []))
        await cluster.at_rest()


async def test_a_client_that_reads_is_never_paused(cluster: FakeCluster) -> None:
    assert await cluster.stream(user("count"), max_tokens=500) == whole_text(500)
    assert cluster.pd_workers[0].paused == []


async def test_a_refused_reply_leaves_no_place_taken(store: EmbeddingStore, monkeypatch) -> None:
    class Full:
        def __init__(self, *args: Any, **options: Any) -> None:
            raise Overloaded("no memory for its reply", retry_after=1)

    async with FakeCluster(store) as cluster:
        with monkeypatch.context() as patched:
            patched.setattr(dispatcher, "ReplyMemory", Full)
            for _ in range(3):
                status, _, reply = await raw_post(cluster.port, json.dumps({"messages": user("x")}).encode())
                assert (status, b"no memory for its reply" in reply) == (429, True)
        assert cluster.quotas["requests"].used == 0
        assert (await cluster.ask(user("x"))).choices

"""For every quota of the proxy: how one tenant takes all that it can, and what another one asks for then.

A new row of the QuotaTable needs a scenario here; `tests/security/tenants/test_quotas.py` runs them all.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from support.fakes.fake_workers import picture, user
from support.hostile.two_tenants import CHAT, FROM, A, B, TwoTenants, chat_body
from support.processes.web import reply
from support.waiting import until
from triptych.proxy.http.connections import ConnectionLimits

MIB = 1 << 20
#: No deadline ends what A has.
PATIENT = ConnectionLimits(head_seconds=600, window_seconds=600, body_seconds=600)
RERANK, MESSAGES, COUNT = "/v1/rerank", "/v1/messages", "/v1/messages/count_tokens"
_TURN = [{"role": "user", "content": "x"}]
SMALL: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"model": "demo", "input": ["x", "y", "x"]},
    RERANK: {"model": "demo", "query": "x", "documents": ["y", "z"]},
    MESSAGES: {"model": "demo", "messages": _TURN, "max_tokens": 2},
    COUNT: {"model": "demo", "messages": _TURN},
}
LARGE_CHAT = (CHAT, chat_body("x" * 100_000))
LARGE_INPUT = ("/v1/embeddings", json.dumps({"model": "demo", "input": ["x" * 100_000]}).encode())
Step = Callable[[TwoTenants], Awaitable[None]]


@dataclass(frozen=True)
class Scenario:
    """`take` returns when A has its share; `ask` when B was answered. `options` are `FakeCluster`'s."""

    take: Step
    ask: Step
    options: Mapping[str, Any] = field(default_factory=dict)
    tls: bool = False


async def full(tenants: TwoTenants, name: str) -> None:
    """A can have no more of the quota."""
    quota = tenants.cluster.quotas[name]
    holder = A if quota.spec.per == "key" else FROM[A]
    await until(lambda: quota.held(holder) and not quota.fits(holder, 1), f"A's share of {name}")


async def small_requests(tenants: TwoTenants) -> None:
    assert await tenants.small_chat() == 200
    assert await tenants.list_models() == ["demo"]


async def small_retrieval(tenants: TwoTenants) -> None:
    """One small request of B to each path without a chat's own shape."""
    for path, body in SMALL.items():
        assert await tenants.post(B, json.dumps(body).encode(), path) == 200, path


async def small_get(tenants: TwoTenants) -> None:
    assert await tenants.get(B) == 200


async def slow_bodies(tenants: TwoTenants, paths: Sequence[str] = (CHAT,)) -> None:
    for at in range(17):
        tenants.spawn(tenants.post(A, b"x" * (MIB // 2), paths[at % len(paths)], length=MIB))
    await full(tenants, "bodies")


async def unsent_messages(tenants: TwoTenants) -> None:
    await tenants.silent_calls(A, 17)
    await full(tenants, "messages")


async def open_calls(tenants: TwoTenants) -> None:
    await tenants.silent_calls(A, 17)
    await full(tenants, "grpc-calls")


async def idle_connections(tenants: TwoTenants) -> None:
    for _ in range(12):
        await tenants.connect(A, tenants.cluster.port)
    await full(tenants, "connections")


async def idle_handshakes(tenants: TwoTenants) -> None:
    for _ in range(12):
        await tenants.connect(A, tenants.cluster.port)
    await full(tenants, "handshakes")


async def idle_grpc_connections(tenants: TwoTenants) -> None:
    for _ in range(12):
        await tenants.connect(A, tenants.cluster.grpc_port)
    await full(tenants, "grpc-connections")


async def one_models_call(tenants: TwoTenants) -> None:
    assert await tenants.list_models() == ["demo"]


async def a_connection_that_stays(tenants: TwoTenants) -> None:
    channel = tenants.channel()
    assert await tenants.list_models(channel=channel) == ["demo"]
    connections = tenants.cluster.quotas["grpc-connections"]
    await until(lambda: connections.held(FROM[B]), "B's connection among those that may stay")
    assert await tenants.list_models(channel=channel) == ["demo"]


async def listeners(tenants: TwoTenants) -> None:
    for _ in range(16):
        own = await tenants.connect(A, tenants.cluster.port)
        head = f"GET /cluster/events HTTP/1.1\r\nHost: x\r\nAuthorization: {tenants.bearer(A)}\r\n\r\n"
        await asyncio.get_running_loop().sock_sendall(own, head.encode())
    await full(tenants, "listeners")


async def another_listener(tenants: TwoTenants) -> None:
    assert await tenants.get(A, "/cluster/events") == 429
    assert await tenants.get(B, "/cluster/events") == 200


async def many_answers(tenants: TwoTenants) -> None:
    """No encoder is there: what has a picture waits."""
    for index in range(2):
        body = chat_body("x", picture(f"{index}"), n=2)
        tenants.spawn(tenants.post(A, body))
    await full(tenants, "requests")
    assert await tenants.post(A, chat_body("x", n=1)) == 429


async def pictures_to_embed(tenants: TwoTenants) -> None:
    """No encoder is there: what has a picture waits."""
    for index in range(4):
        tenants.spawn(tenants.post(A, picture_body(index), "/v1/embeddings"))
    await full(tenants, "requests")
    assert await tenants.post(A, picture_body(4), "/v1/embeddings") == 429
    assert await tenants.post(A, json.dumps(SMALL[RERANK]).encode(), RERANK) == 429


def picture_body(index: int) -> bytes:
    body: dict[str, Any] = {"model": "demo", "messages": user("x", picture(f"{index}"))}
    return json.dumps(body).encode()


async def unread_vectors(tenants: TwoTenants) -> None:
    """A reply above what the kernel keeps for a client is not read; another is refused and its inputs end."""
    (worker,) = tenants.cluster.pd_workers
    worker.vector = (0.123456789,) * 4096
    own = await tenants.connect(A, tenants.cluster.port, receive=4096)
    body = json.dumps({"model": "demo", "input": ["x"] * 80}).encode()
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nAuthorization: {tenants.bearer(A)}\r\n"
    await asyncio.get_running_loop().sock_sendall(
        own, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    )
    replies = tenants.cluster.quotas["replies"]
    await until(lambda: len(worker.submits) == 80 and not worker.requests, "A's inputs to be pooled")
    await until(lambda: replies.held(A) > 4 * MIB, "A's vectors")
    more = json.dumps({"model": "demo", "input": ["x"] * 200}).encode()
    assert await tenants.post(A, more, "/v1/embeddings") in (429, 503)
    await until(lambda: not worker.requests, "A's inputs to end")


async def counted(tenants: TwoTenants) -> None:
    (worker,) = tenants.cluster.pd_workers
    worker.answering.clear()
    for _ in range(12):
        tenants.spawn(tenants.post(A, json.dumps(SMALL[COUNT]).encode(), COUNT))
    await full(tenants, "query-turns")
    await until(lambda: worker.asking == 4, "A's counts at the worker")


async def another_count(tenants: TwoTenants) -> None:
    (worker,) = tenants.cluster.pd_workers
    asked = asyncio.create_task(tenants.post(B, json.dumps(SMALL[COUNT]).encode(), COUNT))
    await until(lambda: worker.asking == 5, "B's count at the worker, behind none of A's that wait")
    worker.answering.set()
    assert await asked == 200


async def queries(tenants: TwoTenants) -> None:
    (worker,) = tenants.cluster.pd_workers
    worker.answering.clear()
    for _ in range(12):
        tenants.spawn(tenants.post(A, b'{"prompt":"x"}', "/tokenize"))
    await full(tenants, "query-turns")
    await until(lambda: worker.asking == 4, "A's queries at the worker")


async def another_query(tenants: TwoTenants) -> None:
    (worker,) = tenants.cluster.pd_workers
    asked = asyncio.create_task(tenants.post(B, b'{"prompt":"x"}', "/tokenize"))
    await until(lambda: worker.asking == 5, "B's query at the worker, behind none of A's that wait")
    worker.answering.set()
    assert await asked == 200


async def large_bodies(tenants: TwoTenants, large: tuple[str, bytes] = LARGE_CHAT) -> None:
    """The parsing thread is held, so that the order of what waits for it can be seen."""
    held = threading.Event()
    tenants.stack.callback(held.set)
    tenants.cluster.dispatcher.parsers.thread.submit(held.wait, 60.0)
    tenants.held = held  # type: ignore[attr-defined]
    tenants.order = []  # type: ignore[attr-defined]
    for _ in range(14):
        tenants.spawn(_large_body(tenants, A, large))
    parser = tenants.cluster.quotas["parser"]
    await full(tenants, "parser")
    await until(lambda: len(parser._waiting.get(A, ())) == 13, "A's bodies before the parser")


async def a_process_that_parses(tenants: TwoTenants) -> None:
    tenants.stack.enter_context(tenants.cluster.quotas["parser-processes"].hold(A, 1))
    for _ in range(3):
        tenants.spawn(tenants.post(A, chat_body("x" * 2 * MIB)))
    await full(tenants, "parser-processes")


async def another_process(tenants: TwoTenants) -> None:
    assert await tenants.post(B, chat_body("x" * 2 * MIB)) == 200


async def a_body_between(tenants: TwoTenants) -> None:
    asked = asyncio.create_task(_large_body(tenants, B, LARGE_CHAT))
    await until(lambda: B in tenants.cluster.quotas["parser"]._waiting, "B's body before the parser")
    tenants.held.set()  # type: ignore[attr-defined]
    await asked
    assert tenants.order.index(B) <= 2, "B's body waited for more of A's than the one in turn"  # type: ignore[attr-defined]


async def _large_body(tenants: TwoTenants, who: str, large: tuple[str, bytes]) -> None:
    path, body = large
    assert await tenants.post(who, body, path) == 200
    tenants.order.append(who)  # type: ignore[attr-defined]


async def unread_streams(tenants: TwoTenants) -> None:
    (worker,) = tenants.cluster.pd_workers
    worker.pace, worker.script = 0.01, ["x" * (64 << 10)] * 200
    for _ in range(4):
        own = await tenants.connect(A, tenants.cluster.port, receive=4096)
        body = chat_body("x", stream=True, max_tokens=200, logprobs=True, top_logprobs=20)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: {tenants.bearer(A)}\r\n"
        await asyncio.get_running_loop().sock_sendall(
            own, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        )
    await until(lambda: len(worker.paused) >= 4, "A's streams are held back")
    held = tenants.cluster.quotas["replies"].held(A)
    assert 4 * (64 << 10) <= held <= MIB, held


async def silent_names(tenants: TwoTenants) -> None:
    answered = threading.Event()
    tenants.stack.callback(answered.set)

    def look_up(host: str, port: int) -> list[tuple[Any, ...]]:
        if host.startswith("silent"):
            answered.wait(60.0)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    tenants.loader._fetcher._connections._look_up = look_up  # type: ignore[union-attr]
    for at in range(4):
        urls = [f"http://silent{at}.{index}.test/" for index in range(8)]
        tenants.spawn(tenants.post(A, url_body(*urls)))
    await full(tenants, "look-ups")


async def slow_servers(tenants: TwoTenants) -> None:
    async def silent(writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    url = (await tenants.web()).give("/slow", silent)
    for _ in range(8):
        tenants.spawn(tenants.post(A, url_body(url)))
    await full(tenants, "fetches")


async def a_picture_by_name(tenants: TwoTenants) -> None:
    web = await tenants.web()
    web.give("/good", reply())
    assert await tenants.post(B, url_body(f"http://good.test:{web.port}/good")) == 200


async def a_picture_by_url(tenants: TwoTenants) -> None:
    assert await tenants.post(B, url_body((await tenants.web()).give("/good", reply()))) == 200


async def busy_threads(tenants: TwoTenants) -> None:
    held = threading.Event()
    tenants.stack.callback(held.set)
    for _ in range(8):
        tenants.spawn(tenants.loader.spool.threads.run(A, lambda: held.wait(60.0)))
    await full(tenants, "loads")


async def media_in_memory(tenants: TwoTenants) -> None:
    tenants.loader.spool.reserve(A, memory=4 * MIB)
    tenants.stack.callback(tenants.loader.spool.reserve, A, memory=-4 * MIB)
    await full(tenants, "media")


async def media_on_disk(tenants: TwoTenants) -> None:
    tenants.loader.spool.reserve(A, disk=4 * MIB)
    tenants.stack.callback(tenants.loader.spool.reserve, A, disk=-4 * MIB)
    await full(tenants, "media-disk")


async def a_picture(tenants: TwoTenants) -> None:
    assert await tenants.post(B, chat_body("x", picture("b", MIB // 4))) == 200


async def a_large_picture(tenants: TwoTenants) -> None:
    assert await tenants.post(B, chat_body("x", picture("b", MIB + MIB // 2))) == 200


def url_body(*urls: str) -> bytes:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "x"}]}]
    return json.dumps({"model": "demo", "max_tokens": 2, "messages": messages}).encode()


def _share(name: str) -> dict[str, Any]:
    return {"max_body": 8 * MIB, "quotas": {name: {"capacity": 8 * MIB, "largest": MIB}}}


LOCAL = {"allow_media_networks": "127.0.0.0/8"}


def _small(name: str, capacity: int = 8) -> dict[str, dict[str, int]]:
    return {name: {"capacity": capacity}}


SCENARIOS: dict[str, Scenario] = {
    "bodies": Scenario(slow_bodies, small_requests, {"connections": PATIENT, "body_memory": 8 * MIB}),
    "messages": Scenario(unsent_messages, small_requests, {"body_memory": 16 * MIB}),
    "grpc-calls": Scenario(open_calls, one_models_call, {"quotas": _small("grpc-calls")}),
    "connections": Scenario(
        idle_connections, small_get, {"connections": PATIENT, "quotas": _small("connections")}
    ),
    "handshakes": Scenario(
        idle_handshakes, small_get, {"connections": PATIENT, "quotas": _small("handshakes")}, tls=True
    ),
    "grpc-connections": Scenario(
        idle_grpc_connections, a_connection_that_stays, {"quotas": _small("grpc-connections")}
    ),
    "listeners": Scenario(listeners, another_listener, {"live": True}),
    "requests": Scenario(many_answers, small_requests, {"encoders": 0, "max_queue": 8}),
    "queries": Scenario(queries, another_query, {"max_queue": 8}),
    "query-turns": Scenario(queries, another_query),
    "parser": Scenario(large_bodies, a_body_between),
    "parser-processes": Scenario(a_process_that_parses, another_process, {"max_body": 8 * MIB}),
    "replies": Scenario(unread_streams, small_requests, {"connections": PATIENT, "reply_memory": 2 * MIB}),
    "fetches": Scenario(slow_servers, a_picture_by_url, {"media_flags": LOCAL | {"media_fetches": 4}}),
    "look-ups": Scenario(
        silent_names, a_picture_by_name, {"media_flags": LOCAL, "quotas": _small("look-ups")}
    ),
    "loads": Scenario(busy_threads, a_picture, {"max_body": 8 * MIB}),
    "media": Scenario(media_in_memory, a_picture, _share("media")),
    "media-disk": Scenario(media_on_disk, a_large_picture, _share("media-disk")),
}
#: The same by the paths that are no chat's: by what A does and the quota that it takes.
RETRIEVAL: dict[str, tuple[str, Scenario]] = {
    "slow bodies": (
        "bodies",
        Scenario(
            partial(slow_bodies, paths=tuple(SMALL)),
            small_retrieval,
            {"connections": PATIENT, "body_memory": 8 * MIB},
        ),
    ),
    "large bodies": ("parser", Scenario(partial(large_bodies, large=LARGE_INPUT), a_body_between)),
    "pictures": ("requests", Scenario(pictures_to_embed, small_retrieval, {"encoders": 0, "max_queue": 8})),
    "unread vectors": (
        "replies",
        Scenario(unread_vectors, small_retrieval, {"connections": PATIENT, "reply_memory": 16 * MIB}),
    ),
    "counts": ("query-turns", Scenario(counted, another_count)),
}

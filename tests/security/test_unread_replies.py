"""Clients that send requests and never read the answers: at a real proxy, and at the gRPC door."""

from __future__ import annotations

import contextlib
import json
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from support.fakes.fake_workers import MODEL, user
from support.fakes.proxy_fakes import FakeCluster, raw_post
from support.processes.proxy_process import ProxyProcess, proxy_process
from support.waiting import until
from triptych.protos import proxy_pb2, proxy_pb2_grpc
from triptych.proxy.grpc import admission
from triptych.store.embedding_store import EmbeddingStore

MIB = 1 << 20
KEYS = "tk-silent-0123456789", "tk-other-0123456789"
BUDGET = 4 * MIB
REPLIES = 'triptych_quota_used{quota="replies"}'
#: What was under way when the worker was told to pause, buffers, and the allocator.
SLACK = 48 * MIB
RICH: dict[str, Any] = {"n": 16, "logprobs": True, "top_logprobs": 20, "stream": True, "max_tokens": 700}


def body(**extra: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": user("x"), "max_tokens": 4} | extra).encode()


def held(proxy: ProxyProcess) -> int:
    request = urllib.request.Request(
        f"http://127.0.0.1:{proxy.port}/metrics", headers={"Authorization": f"Bearer {KEYS[1]}"}
    )
    with urllib.request.urlopen(request) as reply:
        lines = reply.read().decode().splitlines()
    return int(float(next(line for line in lines if line.startswith(REPLIES)).split()[1]))


@pytest.mark.timeout(240)
async def test_replies_that_nobody_reads_stay_within_their_memory_and_others_are_answered(
    store: EmbeddingStore, store_url: str, tmp_path: Path
) -> None:
    flags = "--reply-memory", "4MiB", "--api-key", ",".join(KEYS)
    async with proxy_process(store, store_url, tmp_path, *flags) as proxy:
        proxy.pd.pace = 0.05
        before = proxy.forget_peak()
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                client = stack.enter_context(socket.socket())
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(("127.0.0.1", proxy.port))
                sent = body(**RICH)
                client.sendall(
                    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n"
                    b"Content-Length: %d\r\n\r\n%s" % (KEYS[0].encode(), len(sent), sent)
                )
            await until(lambda: len(set(proxy.pd.paused)) == 64, "all choices are paused", 150.0)
            assert 0 < held(proxy) <= BUDGET // 2
            status, _, _ = await raw_post(proxy.port, body(), {"Authorization": f"Bearer {KEYS[1]}"})
            assert status == 200
            assert proxy.memory("VmHWM") - before < BUDGET + SLACK
        await until(lambda: len(proxy.pd.cancels) == 64, "the clients have gone")
        await until(lambda: held(proxy) == 0, "the memory is free")


async def test_a_grpc_client_that_reads_nothing_loses_its_call(store, monkeypatch):
    monkeypatch.setattr(admission, "WRITE_SECONDS", 0.5)
    monkeypatch.setattr(admission, "ABORT_SECONDS", 0.2)
    async with FakeCluster(store) as cluster:
        pd = cluster.pd_workers[0]
        pd.pace, pd.script = 0.005, ["x" * (64 << 10)] * 400
        async with aio.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
            stub: Any = proxy_pb2_grpc.ProxyServiceStub(channel)
            request = proxy_pb2.ChatRequest(
                messages=[proxy_pb2.ChatMessage(role="user", parts=[proxy_pb2.ChatPart(text="x")])]
            )
            request.sampling.max_tokens = 400
            call = stub.Chat(request)
            await call.read()
            await until(lambda: pd.cancels, "the request is cancelled")
            await cluster.at_rest()
            assert cluster.quotas["replies"].used == 0
            assert (await raw_post(cluster.port, body()))[0] == 200
            call.cancel()

"""A stream whose client takes nothing ends at the write deadline, to the last block at the PD worker."""

from __future__ import annotations

import asyncio
import json
import socket

from support.fakes.fake_workers import MODEL, user, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.proxy.http import endpoint

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

"""Two tenants before one proxy: A takes all that it can, B asks for something small."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import ssl
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import trustme
from grpc import aio

from support.certificates import CertificateFolder, issue, pem_of
from support.fakes.fake_workers import user
from support.fakes.proxy_fakes import FakeCluster
from support.processes.web import WebServer
from support.waiting import within
from triptych.base.rpc.tls.certificates import Certificates
from triptych.protos import proxy_pb2, proxy_pb2_grpc
from triptych.proxy.auth.keys import KeyLimits, KeyRing, new_key
from triptych.proxy.media.loader import MediaLoader
from triptych.store.embedding_store import EmbeddingStore

A, B = "alice", "bob"
#: Addresses that they come from where these count; gRPC clients come from B's.
FROM = {A: "127.0.0.2", B: "127.0.0.1"}
_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]
CHAT = "/v1/chat/completions"


class TwoTenants:
    """A running proxy and what either tenant may do with it. Whatever A has open ends with `stack`."""

    def __init__(
        self, cluster: FakeCluster, keys: dict[str, str], addresses: dict[str, str], stack: AsyncExitStack
    ) -> None:
        self.cluster = cluster
        self._addresses = addresses
        self.stack = stack
        self._keys = keys
        self.trust: ssl.SSLContext | None = None
        self._web: WebServer | None = None

    def bearer(self, who: str) -> str:
        return f"Bearer {self._keys[who]}"

    def spawn(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        """Work of A that may never end."""
        task = asyncio.ensure_future(work)
        self.stack.push_async_callback(asyncio.wait, (task,))
        self.stack.callback(task.cancel)
        return task

    @property
    def loader(self) -> MediaLoader:
        loader = self.cluster.dispatcher._media
        assert isinstance(loader, MediaLoader)
        return loader

    async def web(self) -> WebServer:
        """A server of pictures."""
        if self._web is None:
            self._web = await self.stack.enter_async_context(WebServer())
        return self._web

    async def connect(self, who: str, port: int, *, receive: int = 0) -> socket.socket:
        """A TCP connection that says nothing; `receive`: bytes that its system keeps for it."""
        own = socket.socket()
        if receive:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
        self.stack.callback(own.close)
        own.setblocking(False)
        own.bind((self._addresses[who], 0))
        await within("a connection", asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", port)))
        return own

    async def post(self, who: str, body: bytes, path: str = CHAT, *, length: int = 0) -> int:
        """The status of one POST on a connection of its own; `length`: the body's, where less is sent."""
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {self.bearer(who)}\r\n"
        head += f"Connection: close\r\nContent-Length: {length or len(body)}\r\n\r\n"
        return await self._ask(who, head.encode() + body)

    async def get(self, who: str, path: str = "/v1/models") -> int:
        head = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {self.bearer(who)}\r\n"
        return await self._ask(who, head.encode() + b"Connection: close\r\n\r\n")

    async def _ask(self, who: str, request: bytes) -> int:
        host = "127.0.0.1" if self.trust else None
        reader, writer = await asyncio.open_connection(
            "127.0.0.1",
            self.cluster.port,
            local_addr=(self._addresses[who], 0),
            ssl=self.trust,
            server_hostname=host,
        )
        try:
            writer.write(request)
            line = await reader.readline()
            return int(line.split()[1]) if line else 0
        finally:
            writer.close()

    async def small_chat(self, who: str = B) -> int:
        return await self.post(who, chat_body())

    def channel(self) -> aio.Channel:
        channel = aio.insecure_channel(f"127.0.0.1:{self.cluster.grpc_port}", options=_OPTIONS)
        self.stack.push_async_callback(channel.close)
        return channel

    async def list_models(self, who: str = B, channel: aio.Channel | None = None) -> list[str]:
        stub: Any = proxy_pb2_grpc.ProxyServiceStub(channel or self.channel())
        metadata = (("authorization", self.bearer(who)),)
        reply = await stub.ListModels(
            proxy_pb2.ListModelsRequest(), metadata=metadata, timeout=30, wait_for_ready=True
        )
        return list(reply.models)

    async def silent_calls(self, who: str, count: int) -> None:
        """gRPC calls whose message never comes."""
        method: Any = self.channel().stream_stream("/triptych.v1.ProxyService/Chat")
        for _ in range(count):
            call = method(metadata=(("authorization", self.bearer(who)),), timeout=120)
            self.stack.callback(call.cancel)
            await call.wait_for_connection()


def chat_body(text: str = "x", *pictures: bytes, **fields: Any) -> bytes:
    return json.dumps(
        {"model": "demo", "max_tokens": 2, "messages": user(text, *pictures), **fields}
    ).encode()


async def two_tenants(
    store: EmbeddingStore,
    folder: Path,
    stack: AsyncExitStack,
    *,
    tls: bool = False,
    one_address: bool = False,
    further_keys: int = 0,
    **options: Any,
) -> TwoTenants:
    """A proxy before scripted workers, with `options` of `FakeCluster`; it ends with `stack`.

    `one_address`: they come from the same one, as behind a gateway. `further_keys`: of other tenants.
    """
    keys, lines = {}, []
    for name in (A, B):
        keys[name], line = new_key(name)
        lines.append(line)
    lines += [f"further{number} sha256:{secrets.token_hex(32)}" for number in range(further_keys)]
    (folder / "keys").write_text("\n".join(lines))
    trust = None
    if tls:
        authority, files = trustme.CA(), CertificateFolder(folder / "front")
        files.write(issue(authority, "127.0.0.1"), pem_of(authority))
        trust = ssl.create_default_context(cadata=pem_of(authority).decode())
        options |= {"front_door": Certificates(files.front_door), "trust": trust}
    cluster = FakeCluster(store, keys=KeyRing("", str(folder / "keys"), KeyLimits()), **options)
    await stack.enter_async_context(cluster)
    addresses = {A: FROM[B], B: FROM[B]} if one_address else FROM
    tenants = TwoTenants(cluster, keys, addresses, await stack.enter_async_context(AsyncExitStack()))
    tenants.trust = trust
    return tenants

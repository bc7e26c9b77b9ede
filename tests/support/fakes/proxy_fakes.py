"""A proxy before workers that follow a script."""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpcore2
import pytest
import uvicorn.server
from httpx2 import AsyncClient
from openai import AsyncOpenAI
from starlette.types import ASGIApp

from support.fakes.fake_encoder import FakeEncoder
from support.fakes.fake_pd import FakePD
from support.fakes.fake_workers import MODEL, TOKEN
from support.waiting import until, within
from triptych.base.config import ProxyConfig
from triptych.base.metrics import ProxyMetrics
from triptych.base.rpc.channels import listen, make_server
from triptych.base.rpc.tls import certificates
from triptych.base.rpc.tls.certificates import Certificates
from triptych.base.tracing.tracer import Tracer
from triptych.base.types import WorkerInfo
from triptych.protos import encoder_pb2, proxy_pb2_grpc
from triptych.proxy import pool
from triptych.proxy.auth.keys import KeyRing
from triptych.proxy.auth.limits import PrincipalLimits
from triptych.proxy.auth.middleware import Authenticator, AuthMiddleware
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.grpc.admission import GrpcAdmission, add_reflection, server_options
from triptych.proxy.grpc.connections import GrpcConnections
from triptych.proxy.grpc.server import ProxyServicer, parses_of
from triptych.proxy.http.connections import ConnectionLimits
from triptych.proxy.http.delivery import DeliveryMiddleware
from triptych.proxy.http.endpoint import BodyMiddleware
from triptych.proxy.http.peers import TrustedProxies
from triptych.proxy.http.refusals import RefusalMiddleware, Refusals
from triptych.proxy.http.server import HttpServer, bind
from triptych.proxy.live.service import LiveData
from triptych.proxy.media.loader import make_loader
from triptych.proxy.openai.app import make_app
from triptych.proxy.openai.chat.endpoint import ApiLimits
from triptych.proxy.pool import WorkerPool
from triptych.proxy.quotas.table import QuotaTable, quota_specs
from triptych.proxy.service import GrpcTransport
from triptych.registry.registry import Registry
from triptych.store.embedding_store import EmbeddingStore

# Every client, of http:// too, would read the system's CAs: that takes longer than most requests.
httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)
# uvicorn looks every 0.1 s whether it shall end, and then waits as long for its connections.
_hurried = SimpleNamespace(**{**vars(asyncio), "sleep": lambda seconds: asyncio.sleep(seconds / 10)})
uvicorn.server.asyncio = _hurried  # type: ignore[attr-defined, assignment]


def poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy looks at registry, workers and certificates more often than a deployed one."""
    monkeypatch.setattr(pool, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(pool, "HEALTH_INTERVAL", 0.2)
    monkeypatch.setattr(certificates, "LOOK_SECONDS", 0.1)


class FakeCluster:
    """A real proxy over HTTP and gRPC, with scripted workers around the test's store."""

    def __init__(
        self,
        store: EmbeddingStore,
        *,
        encoders: int = 1,
        pd_workers: int = 1,
        modality: str = "image",
        encoder_decoder: bool | None = None,
        **options: Any,
    ) -> None:
        self.store = store
        self.registry = Registry(store)
        self.encoders = [FakeEncoder(store) for _ in range(encoders)]
        self.pd_workers = [FakePD() for _ in range(pd_workers)]
        self.metrics = ProxyMetrics()
        self._modality = modality
        self._encoder_decoder = modality != "image" if encoder_decoder is None else encoder_decoder
        self._options = options
        self.grpc_server: Any = None

    async def __aenter__(self) -> FakeCluster:
        # A worker of a busy machine that answers late would have its requests taken away.
        self._silence = mock.patch.object(pool, "SILENCE_SECONDS", self._options.pop("silence", 20.0))
        self._silence.start()
        try:
            return await self._start()
        except BaseException:
            self._silence.stop()
            # What is not stopped here is complained of in the middle of another test.
            for worker in (*self.encoders, *self.pd_workers):
                await worker.kill()
            if self.grpc_server is not None:
                await self.grpc_server.stop(None)
            raise

    async def _start(self) -> FakeCluster:
        options = dict(self._options)
        token = options.pop("token", TOKEN)
        internal: Certificates | None = options.pop("internal", None)
        front_door: Certificates | None = options.pop("front_door", None)
        worker_certificates = options.pop("worker_certificates", None)
        #: How the client verifies the front door.
        self._trust: ssl.SSLContext | None = options.pop("trust", None)
        await self._start_workers(token, worker_certificates)
        timeout = options.pop("request_timeout", 20.0)
        max_body = options.pop("max_body", 1 << 20)
        keys: KeyRing | None = options.pop("keys", None)
        limits = options.pop("connections", ConnectionLimits())
        trusted = options.pop("trusted", TrustedProxies())
        flags = options.pop("media_flags", {})
        config = ProxyConfig(
            max_body=max_body,
            body_memory=options.pop("body_memory", 64 << 20),
            max_queue=options.pop("max_queue", 256),
            reply_memory=options.pop("reply_memory", 512 << 20),
            **flags,
        )
        self.quotas = quota_table(config, keys, options.pop("quotas", {}))
        self.quotas.show(self.metrics)
        tracer = options.pop("tracer", None)
        authenticator = Authenticator(keys, PrincipalLimits(), self.metrics) if keys is not None else None
        self.pool = WorkerPool(
            self.registry,
            "proxy-test",
            token,
            certificates=internal,
            insecure=options.pop("insecure", False),
            health_timeout=options.pop("health_timeout", 30.0),
        )
        media = make_loader(ProxyConfig(**flags), self.metrics, self.quotas)
        timeouts = {name: options.pop(name) for name in ("phase_timeout", "stall_timeout") if name in options}
        transport = GrpcTransport(self.pool, "proxy-test", **timeouts)
        reject = options.pop("unknown_fields", "ignore") == "reject"
        live = LiveData(ProxyConfig(), self.pool) if options.pop("live", False) else None
        self.live = live
        self.dispatcher = Dispatcher(
            self.pool,
            self.store,
            self.metrics,
            transport,
            proxy_id="proxy-test",
            media=media,
            quotas=self.quotas,
            **options,
        )
        if live is not None:
            self.dispatcher.recorder.subscribe(live.calls)
        api = ApiLimits(8, 16, max_body, timeout, reject)
        await self._open(api, authenticator, front_door, limits, trusted, tracer)
        await self.pool.start()
        await until(lambda: self.attached, "the streams of all PD workers")
        self.client = self._make_client("https" if front_door else "http")
        return self

    async def _open(
        self,
        api: ApiLimits,
        authenticator: Authenticator | None,
        front_door: Certificates | None,
        limits: ConnectionLimits,
        trusted: TrustedProxies,
        tracer: Tracer | None,
    ) -> None:
        """Opens the HTTP and the gRPC port, wired as the proxy's own."""
        live = self.live
        front = make_app(
            self.dispatcher,
            self.pool,
            self.metrics.registry,
            api,
            live=() if live is None else live.start(self.dispatcher, self.metrics, "proxy-test"),
            tracer=tracer,
        )
        listener = bind("127.0.0.1", 0)
        self.listener = listener
        self.bodies = self.quotas["bodies"]
        refusals = Refusals(self.metrics, None if live is None else live.refused)
        app: ASGIApp = DeliveryMiddleware(BodyMiddleware(front, self.bodies), self.quotas["replies"])
        if authenticator is not None:
            app = AuthMiddleware(app, authenticator)
        app = RefusalMiddleware(app, front.routes, refusals)
        self.http = HttpServer(app, listener, limits, front_door, self.quotas, trusted)
        self.http_task = await self.http.start()
        self.port = listener.getsockname()[1]
        connections = GrpcConnections(self.quotas["grpc-connections"], trusted)
        admission = GrpcAdmission(
            self.quotas,
            authenticator,
            refusals,
            self.dispatcher.parsers,
            parses_of(max_images=api.max_images, timeout=api.timeout, max_choices=api.max_choices),
            connections=connections,
            tracer=tracer,
        )
        await self._start_grpc(admission, front_door)
        connections.port = self.grpc_port
        self._beside = [asyncio.create_task(work) for work in (self.quotas.run(), connections.run())]

    def _make_client(self, scheme: str) -> AsyncOpenAI:
        return AsyncOpenAI(
            base_url=f"{scheme}://127.0.0.1:{self.port}/v1",
            api_key="-",
            max_retries=0,
            timeout=40.0,
            http_client=AsyncClient(verify=self._trust, timeout=40.0) if self._trust else None,
        )

    async def _start_workers(self, token: str, certificates: Certificates | None) -> None:
        for worker in (*self.encoders, *self.pd_workers):
            worker.token = token
            worker.certificates = certificates
            worker.modality = self._modality
            worker.encoder_decoder = self._encoder_decoder
            worker.register = self._register
            await worker.start()

    async def _start_grpc(self, admission: GrpcAdmission, front_door: Certificates | None) -> None:
        self.grpc_server = make_server(interceptors=[admission], options=server_options(self.quotas))
        servicer = ProxyServicer(self.dispatcher, self.pool)
        proxy_pb2_grpc.add_ProxyServiceServicer_to_server(servicer, self.grpc_server)
        add_reflection(self.grpc_server)
        self.grpc_port = listen(self.grpc_server, "127.0.0.1:0", front_door, mutual=False)
        await self.grpc_server.start()

    async def _register(self, info: WorkerInfo) -> None:
        await self.registry.register(info, term=600.0)

    @property
    def attached(self) -> bool:
        """Whether the proxy may send requests to every PD worker, which has its stream a moment before."""
        links = self.dispatcher._router.links
        return all(worker.address in links and links[worker.address].attached for worker in self.pd_workers)

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._stop()
        finally:
            self._silence.stop()

    async def _stop(self) -> None:
        if self.live is not None:
            await within("the live data's end", self.live.stop())
        await within("the client's end", self.client.close())
        await within("the dispatcher's end", self.dispatcher.close())
        await within("the HTTP server's end", self.http.stop(self.http_task, linger=0.0))
        self.listener.close()
        await within("the gRPC server's end", self.grpc_server.stop(None))
        for task in self._beside:
            task.cancel()
        await within("the end of what runs beside", asyncio.wait(self._beside))
        await within("the pool's end", self.pool.stop())
        for worker in (*self.encoders, *self.pd_workers):
            await within(f"the end of {worker.address}", worker.kill())

    @property
    def received(self) -> int:
        """Output tokens that the proxy has of the requests in flight."""
        return sum(len(request.lifecycle.output_token_ids) for request in self.dispatcher._requests.values())

    @property
    def admitted(self) -> int:
        """Items for which a PD worker has room, as far as the proxy has heard."""
        return sum(bool(job.admitted) for job in self.dispatcher.jobs.table.jobs())

    async def ask(self, messages: Any, **extra: Any) -> Any:
        """A reply in one piece."""
        options: dict[str, Any] = {"max_tokens": 8, **extra}
        return await self.client.chat.completions.create(model=MODEL, messages=messages, **options)

    async def stream(self, messages: Any, **extra: Any) -> str:
        """A streamed reply's text."""
        options: dict[str, Any] = {"max_tokens": 8, **extra}
        chunks: Any = await self.client.chat.completions.create(
            model=MODEL, messages=messages, stream=True, **options
        )
        return "".join([c.choices[0].delta.content or "" async for c in chunks if c.choices])

    @property
    def jobs(self) -> list[encoder_pb2.EncodeJob]:
        return [job for encoder in self.encoders for job in encoder.jobs]

    async def at_rest(self) -> None:
        """Nothing of any request is left in the proxy."""
        await until(lambda: self.dispatcher.in_flight == 0, "the end of all requests")
        table = self.dispatcher.jobs.table
        await until(lambda: len(table) == 0 and table.published_bytes == 0, "the end of all jobs")
        await until(lambda: self.dispatcher.media_bytes == 0, "the end of all media")


def quota_table(
    config: ProxyConfig, keys: KeyRing | None, changes: Mapping[str, Mapping[str, Any]]
) -> QuotaTable:
    """The quotas of a small machine; `changes` by name replace facts of them."""
    specs = (replace(spec, **changes.get(spec.name, {})) for spec in quota_specs(config))
    return QuotaTable(specs, shared=lambda: keys is None or keys.shared)


async def raw_post(
    port: int, body: bytes, headers: dict[str, str] | None = None, path: str = "/v1/chat/completions"
) -> tuple[int, dict[str, str], bytes]:
    """One POST on a connection of its own: status, headers, body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = {"Host": "localhost", "Content-Length": str(len(body)), "Connection": "close", **(headers or {})}
    head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items())
    writer.write(head.encode() + b"\r\n" + body)
    await writer.drain()
    raw = await reader.read()
    writer.close()
    await writer.wait_closed()
    top, _, rest = raw.partition(b"\r\n\r\n")
    first, *others = top.decode().split("\r\n")
    found = {name.lower(): value for name, value in (line.split(": ", 1) for line in others)}
    return int(first.split()[1]), found, rest


def as_json(raw: bytes) -> Any:
    return json.loads(raw)

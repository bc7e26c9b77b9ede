"""The proxy process: connects, serves HTTP and gRPC until a signal, drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import uuid
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Protocol

from grpc import aio
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from triptych.base.config import (
    ProxyConfig,
    check_drain_timeout,
    check_front_door,
    check_ports_differ,
    check_scaling,
    is_loopback,
)
from triptych.base.edges import load_edge
from triptych.base.engine_beat import check_stall_timeout
from triptych.base.errors import ConfigError
from triptych.base.machine.heap import bound_heap, collect_rarely
from triptych.base.metrics import ProxyMetrics, show_expiry
from triptych.base.rpc.channels import listen, make_server
from triptych.base.rpc.ports import refused_port
from triptych.base.rpc.tls.certificates import ProxyCertificates, proxy_certificates
from triptych.base.scaling import ScalingDecision
from triptych.base.status_server import ServiceStatus, StatusServer, status_server
from triptych.base.tracing.start import check_tracing, start_tracer
from triptych.base.worker_process import Health, ProcessWatch, stop_signal
from triptych.protos import proxy_pb2_grpc
from triptych.proxy.auth.keys import KeyLimits, KeyRing
from triptych.proxy.auth.limits import PrincipalLimits
from triptych.proxy.auth.middleware import Authenticator, AuthMiddleware
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.encoders.encoder_client import open_stream
from triptych.proxy.encoders.video_splitter import VideoSplitter
from triptych.proxy.grpc.admission import GrpcAdmission, add_reflection, server_options
from triptych.proxy.grpc.connections import GrpcConnections
from triptych.proxy.grpc.server import ProxyServicer, parses_of
from triptych.proxy.http.connections import ConnectionLimits, raise_file_limit
from triptych.proxy.http.delivery import DeliveryMiddleware
from triptych.proxy.http.endpoint import BodyMiddleware
from triptych.proxy.http.hosts import HostMiddleware, own_names, read_origins
from triptych.proxy.http.peers import TrustedProxies
from triptych.proxy.http.refusals import RefusalMiddleware, Refusals
from triptych.proxy.http.server import HttpServer, bind
from triptych.proxy.media.first_checks import check_proxy_flags
from triptych.proxy.media.loader import make_loader
from triptych.proxy.openai.app import make_app
from triptych.proxy.openai.chat.endpoint import ApiLimits
from triptych.proxy.pd.link import open_link
from triptych.proxy.pool import PDReadiness, WorkerPool
from triptych.proxy.quotas.table import QuotaTable, quota_specs
from triptych.proxy.requests.recorder import CallObserver
from triptych.proxy.scaling.autoscaler import Autoscaler, start_scaling
from triptych.proxy.scaling.upkeep import PoolMetrics, Upkeep
from triptych.registry.minute_counts import MinuteCounts
from triptych.registry.registry import Registry
from triptych.store.bulk import StoreMemory
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore

logger = logging.getLogger(__name__)

STORE_SECONDS = 30.0


class GrpcTransport:
    """The product's `Transport`, over the channels of the worker pool. Timeouts are in seconds, 0 for
    `stall_timeout` watches no engine."""

    def __init__(
        self, pool: WorkerPool, proxy_id: str, *, phase_timeout: float = 60.0, stall_timeout: float = 60.0
    ) -> None:
        self.open_job = partial(open_stream, pool, phase_timeout)
        self.open_link = partial(open_link, pool, proxy_id, stall_timeout)


async def run(config: ProxyConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains. ConfigError before that when it cannot work."""
    check_front_door(config.host, api_key=config.api_key, api_key_file=config.api_key_file, auth=config.auth)
    check_stall_timeout(config.stall_timeout)
    check_drain_timeout(config.drain_timeout)
    check_scaling(config.scaling)
    check_ports_differ(config)
    check_tracing(config)
    check_proxy_flags(config)
    bound_heap()
    keys = _key_ring(config)
    certificates = proxy_certificates(config)
    if certificates.front_door is None and not is_loopback(config.host):
        shown = "API keys, " if keys.in_use else ""
        logger.warning("--insecure: %sprompts and answers come to %s in clear text", shown, config.host)
    files = raise_file_limit()
    trusted = TrustedProxies(config.trusted_proxies, proxy_protocol=config.proxy_protocol)
    # Before anything is seen of this process: a signal that comes while it starts ends it in good order too.
    stop = stop_signal()
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(bind(config.host, config.port))
        page = _status_page(config, stack)
        store = await _connect(config.store, stop)
        if store is None:
            return
        stack.push_async_callback(store.close)
        proxy = ProxyProcess(config, store, keys, files, trusted, certificates, stack, page)
        task = await proxy.serve(listener)
        collect_rarely()
        await _until_stopped(task, stop)
        await proxy.drain(config.drain_timeout)
        await proxy.dispatcher.close()


def _status_page(config: ProxyConfig, stack: contextlib.AsyncExitStack) -> StatusServer | None:
    """The server of --metrics-port, where there is one, from the process's start to its end."""
    if not config.metrics_port:
        return None
    server = status_server(config.metrics_host or config.host, config.metrics_port, ServiceStatus())
    return stack.enter_context(server)


def _key_ring(config: ProxyConfig) -> KeyRing:
    limits = KeyLimits(
        requests_per_minute=config.key_requests_per_minute,
        tokens_per_minute=config.key_tokens_per_minute,
        concurrent_requests=config.key_concurrent_requests,
    )
    keys = KeyRing(config.api_key, config.api_key_file, limits)
    if not keys.in_use and not is_loopback(config.host):
        logger.warning("%s is reachable from other machines and asks for no API key (--no-auth)", config.host)
    return keys


class Live(Protocol):
    """Live data: an edge, whose `calls` subscribe to the recorder."""

    calls: CallObserver

    def start(
        self,
        dispatcher: Dispatcher,
        metrics: ProxyMetrics,
        proxy_id: str,
        *,
        decision: Callable[[str], ScalingDecision | None],
        store_memory: Callable[[], StoreMemory | None],
    ) -> Sequence[Route]: ...
    def refused(self, status: int, route: str) -> None: ...
    def drain(self) -> None: ...
    async def stop(self) -> None: ...


class ProxyProcess:
    """The proxy's parts and its servers; `stack` ends all that was started, in reverse order."""

    http: HttpServer
    grpc: aio.Server
    health: Health
    scaling: Autoscaler | None

    def __init__(
        self,
        config: ProxyConfig,
        store: EmbeddingStore,
        keys: KeyRing,
        files: int,
        trusted: TrustedProxies,
        certificates: ProxyCertificates,
        stack: contextlib.AsyncExitStack,
        page: StatusServer | None,
    ) -> None:
        self.config, self.store, self.trusted = config, store, trusted
        self.certificates, self.stack, self.page = certificates, stack, page
        self.proxy_id = f"proxy-{uuid.uuid4().hex}"
        # A client of ours that has a key is not trusted to choose what is recorded.
        self.tracer = start_tracer(config, "proxy", self.proxy_id, trusts_parent=not keys.in_use)
        if self.tracer is not None:
            stack.push_async_callback(asyncio.to_thread, self.tracer.close)
        self.metrics = ProxyMetrics()
        internal, front_door = certificates.internal, certificates.front_door
        show_expiry(self.metrics.registry, internal=internal, front_door=front_door)
        self.pool = WorkerPool(
            Registry(store),
            self.proxy_id,
            config.internal_token,
            certificates=certificates.internal,
            insecure=config.insecure,
        )
        stack.push_async_callback(self.pool.stop)
        live = load_edge("triptych.proxy.live.service") if config.page else None
        self.live: Live | None = None if live is None else live.LiveData(config, self.pool)
        self.quotas = QuotaTable(quota_specs(config, files), shared=lambda: keys.shared)
        self.quotas.show(self.metrics)
        _run_beside(stack, self.quotas.run(), "quotas")
        self.dispatcher = Dispatcher(
            self.pool,
            store,
            self.metrics,
            GrpcTransport(self.pool, self.proxy_id, stall_timeout=config.stall_timeout),
            proxy_id=self.proxy_id,
            quotas=self.quotas,
            media=make_loader(config, self.metrics, self.quotas),
            flow_control=config.flow_control,
            skip_held_items=config.skip_held_items,
            store_wait=config.store_wait,
            prefill_threshold=config.prefill_threshold,
            videos=VideoSplitter(self.pool, partial(self.pool.channel, "encoder")),
        )
        if self.live is not None:
            self.dispatcher.recorder.subscribe(self.live.calls)
        stack.push_async_callback(self.dispatcher.close)
        limits = PrincipalLimits(MinuteCounts(store))
        self.authenticator = Authenticator(keys, limits, self.metrics) if keys.in_use else None
        self.names = own_names(config, keys=keys.in_use)
        self.refusals = Refusals(self.metrics, None if self.live is None else self.live.refused)

    async def serve(self, listener: socket.socket) -> asyncio.Task[None]:
        """Starts everything; the task of the HTTP server."""
        config, pool = self.config, self.pool
        grpc_port = await self._serve_grpc()
        watch = await self.stack.enter_async_context(ProcessWatch(self.health, (), config.stall_timeout))
        await pool.start()
        shown = PoolMetrics(pool, self.metrics)
        upkeep = Upkeep(config, self.store, pool, self.dispatcher, shown.store)
        await upkeep.poll()
        upkeep.start()
        self.stack.push_async_callback(upkeep.stop)
        self.scaling = await start_scaling(
            config.scaling,
            self.store,
            pool,
            self.dispatcher,
            self.metrics,
            self.proxy_id,
            self.stack,
            self.certificates.internal,
        )
        task = await self._serve_http(listener, self._start_live(shown))
        host, port = listener.getsockname()[:2]
        scheme = "https" if self.certificates.front_door else "http"
        logger.info("ready: proxy %s://%s:%d grpc %s:%d", scheme, host, port, config.host, grpc_port)
        if (page := self.page) is not None:
            readiness = PDReadiness(pool, page.status)
            page.registry = self.metrics.registry
            page.status.follow(watch.healthy, readiness.degraded)
            page.status.cut_off = lambda: pool.cut_off
            pool.subscribe(readiness)
            readiness.workers_changed()
        return task

    async def _serve_grpc(self) -> int:
        """The gRPC server with its health service: the port that it listens on."""
        config = self.config
        connections = GrpcConnections(self.quotas["grpc-connections"], self.trusted)
        admission = GrpcAdmission(
            self.quotas,
            self.authenticator,
            self.refusals,
            self.dispatcher.parsers,
            parses_of(
                max_images=config.max_images,
                timeout=config.request_timeout,
                max_choices=config.max_choices,
            ),
            connections=connections,
            tracer=self.tracer,
        )
        servicer = ProxyServicer(self.dispatcher, self.pool)
        server = self.grpc = make_server(interceptors=[admission], options=server_options(self.quotas))
        proxy_pb2_grpc.add_ProxyServiceServicer_to_server(servicer, server)
        add_reflection(server)
        self.health = Health(server)
        await self.health.serving()
        address = f"{config.host}:{config.grpc_port}"
        try:
            port = listen(server, address, self.certificates.front_door, mutual=False)
        except RuntimeError:
            raise refused_port(config.host, config.grpc_port, "--grpc-port") from None
        await server.start()
        self.stack.push_async_callback(server.stop, 1.0)
        connections.port = port
        _run_beside(self.stack, connections.run(), "gRPC connections")
        return port

    def _start_live(self, shown: PoolMetrics) -> Sequence[Route]:
        """The routes of the live data; none with --no-page."""
        if self.live is None:
            return ()
        self.stack.push_async_callback(self.live.stop)
        return self.live.start(
            self.dispatcher,
            self.metrics,
            self.proxy_id,
            decision=self.scaling.of_pool if self.scaling is not None else lambda pool: None,
            store_memory=lambda: shown.memory,
        )

    async def _serve_http(self, listener: socket.socket, live: Sequence[Route]) -> asyncio.Task[None]:
        """Has the HTTP server accept connections; its task."""
        config, quotas = self.config, self.quotas
        front = make_app(
            self.dispatcher,
            self.pool,
            self.metrics.registry,
            ApiLimits(
                config.max_images,
                config.max_choices,
                config.max_body,
                config.request_timeout,
                config.unknown_fields == "reject",
            ),
            metrics=not config.metrics_port,
            page=config.page,
            live=live,
            tracer=self.tracer,
        )
        bodies = quotas["bodies"]
        app: ASGIApp = DeliveryMiddleware(BodyMiddleware(front, bodies), quotas["replies"])
        if self.authenticator is not None:
            app = AuthMiddleware(app, self.authenticator)
        elif self.names is not None:
            app = HostMiddleware(app, self.names)
        app = RefusalMiddleware(app, front.routes, self.refusals)
        if config.allowed_origins:
            app = CORSMiddleware(
                app,
                allow_origins=read_origins(config.allowed_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["X-Request-ID", "X-Triptych-Ignored-Fields", "Retry-After"],
            )
        limits = ConnectionLimits(
            window_seconds=bodies.spec.idle_seconds, body_seconds=bodies.spec.total_seconds
        )
        self.http = HttpServer(app, listener, limits, self.certificates.front_door, quotas, self.trusted)
        task = await self.http.start()
        self.stack.push_async_callback(self.http.stop, task)
        return task

    async def drain(self, seconds: float) -> None:
        """Clients are sent elsewhere, nothing new is taken, what is in flight gets up to `seconds` in all.

        Where a load balancer may stand in front, requests on connections that clients have kept are still
        served, for half of that time at most; gRPC clients leave by themselves, with the calls that are not
        served yet.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        if self.page is not None:
            self.page.status.drain()
        if self.live is not None:
            self.live.drain()
        if self.scaling is not None:
            self.scaling.drain()
        await self.health.leaving()
        if not is_loopback(self.config.host):
            leaving = asyncio.create_task(self.grpc.stop(seconds), name="end of gRPC")
            self.stack.push_async_callback(asyncio.wait, (leaving,), timeout=1.0)
            await self.http.linger(seconds / 2)
        self.dispatcher.drain()
        logger.info("draining %d requests", self.dispatcher.in_flight)
        while self.dispatcher.in_flight and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)


def _run_beside(stack: contextlib.AsyncExitStack, work: Coroutine[object, object, None], name: str) -> None:
    """Runs until `stack` ends it."""
    task = asyncio.create_task(work, name=name)
    stack.push_async_callback(asyncio.wait, (task,), timeout=1.0)
    stack.callback(task.cancel)


async def _connect(url: str, stop: asyncio.Event) -> EmbeddingStore | None:
    """Waits up to 30 s for a store that is still starting; None when `stop` is set meanwhile."""
    if not url:
        raise ConfigError("--store is missing: say --store redis://host:port/0 or unix:///path")
    deadline = asyncio.get_running_loop().time() + STORE_SECONDS
    logged = ""
    while not stop.is_set():
        try:
            return await EmbeddingStore.connect(url)
        except StoreUnavailable as error:
            if asyncio.get_running_loop().time() > deadline:
                raise ConfigError(f"--store: the store does not answer: {error}") from None
            if logged != str(error):
                logged = str(error)
                logger.warning("waits up to %g s for the store: %s", STORE_SECONDS, logged)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 0.5)
    return None


async def _until_stopped(http_task: asyncio.Task[None], stop: asyncio.Event) -> None:
    wait = asyncio.create_task(stop.wait())
    await asyncio.wait((wait, http_task), return_when=asyncio.FIRST_COMPLETED)
    wait.cancel()

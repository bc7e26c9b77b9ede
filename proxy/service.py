"""The proxy process: connects, serves HTTP and gRPC until a signal, drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from grpc import aio
from starlette.routing import Route
from starlette.types import ASGIApp

from triptych.base.config import (
    ProxyConfig,
    check_drain_timeout,
    check_front_door,
    check_scaling,
    check_times,
    is_loopback,
)
from triptych.base.errors import ConfigError
from triptych.base.machine.heap import bound_heap, collect_rarely
from triptych.base.metrics import ProxyMetrics
from triptych.base.rpc.channels import listen, make_server
from triptych.base.rpc.tls.certificates import Certificates
from triptych.base.rpc.tls.proxy_certificates import ProxyCertificates
from triptych.base.status.service_status import ServiceStatus
from triptych.base.status.status_server import StatusServer, status_server
from triptych.base.tracing.start import check_tracing, start_tracer
from triptych.base.tracing.tracer import Tracer
from triptych.base.watchdog import check_stall_timeout
from triptych.base.worker_process import Health, ProcessWatch, stop_signal
from triptych.protos import proxy_pb2_grpc
from triptych.proxy.auth.keys import KeyLimits, KeyRing
from triptych.proxy.auth.limits import PrincipalLimits
from triptych.proxy.auth.middleware import Authenticator, AuthMiddleware
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.encoders.encoder_client import open_stream
from triptych.proxy.grpc.admission import GrpcAdmission, server_options
from triptych.proxy.grpc.connections import GrpcConnections
from triptych.proxy.grpc.server import ProxyServicer
from triptych.proxy.http.connections import ConnectionLimits, raise_file_limit
from triptych.proxy.http.delivery import DeliveryMiddleware
from triptych.proxy.http.endpoint import BodyMiddleware
from triptych.proxy.http.peers import TrustedProxies
from triptych.proxy.http.refusals import RefusalMiddleware, Refusals
from triptych.proxy.http.server import HttpServer, bind, port_error
from triptych.proxy.live.service import LiveData
from triptych.proxy.media.loader import make_loader
from triptych.proxy.openai.app import ApiLimits, make_app
from triptych.proxy.pd.link import open_link
from triptych.proxy.pool import PDReadiness, WorkerPool
from triptych.proxy.quotas.table import QuotaTable, quota_specs
from triptych.proxy.scaling.autoscaler import Autoscaler, start_scaling
from triptych.proxy.scaling.upkeep import PoolMetrics, Upkeep
from triptych.registry.registry import Registry
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
    check_times(config)
    check_tracing(config)
    bound_heap()
    keys = _key_ring(config)
    certificates = ProxyCertificates.of(config)
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
        serving = await _serve(config, store, keys, listener, files, trusted, certificates, stack, page)
        collect_rarely()
        await _until_stopped(serving.task, stop)
        await _drain(serving, config.drain_timeout)
        await serving.parts.dispatcher.close()


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


@dataclass(frozen=True, slots=True)
class _Parts:
    """What the proxy's servers share; `stack` ends all that was started, in reverse order."""

    config: ProxyConfig
    store: EmbeddingStore
    metrics: ProxyMetrics
    pool: WorkerPool
    dispatcher: Dispatcher
    authenticator: Authenticator | None
    refusals: Refusals
    quotas: QuotaTable
    files: int
    trusted: TrustedProxies
    certificates: ProxyCertificates
    stack: contextlib.AsyncExitStack
    page: StatusServer | None
    live: LiveData | None
    tracer: Tracer | None


@dataclass(frozen=True, slots=True)
class _Serving:
    """The running servers of the proxy, for the drain."""

    parts: _Parts
    scaling: Autoscaler | None
    health: Health
    grpc: aio.Server
    http: HttpServer
    task: asyncio.Task[None]


async def _serve(
    config: ProxyConfig,
    store: EmbeddingStore,
    keys: KeyRing,
    listener: socket.socket,
    files: int,
    trusted: TrustedProxies,
    certificates: ProxyCertificates,
    stack: contextlib.AsyncExitStack,
    page: StatusServer | None,
) -> _Serving:
    """Starts everything; `stack` ends it in reverse order."""
    proxy_id = f"proxy-{uuid.uuid4().hex}"
    # A client of ours that has a key is not trusted to choose what is recorded.
    tracer = start_tracer(config, "proxy", proxy_id, trusts_parent=not keys.in_use)
    if tracer is not None:
        stack.push_async_callback(asyncio.to_thread, tracer.close)
    metrics = ProxyMetrics()
    certificates.show_expiry(metrics.registry)
    internal = certificates.internal
    token, clear_text = config.internal_token, config.insecure
    pool = WorkerPool(Registry(store), proxy_id, token, certificates=internal, insecure=clear_text)
    stack.push_async_callback(pool.stop)
    live = LiveData(config, pool) if config.page else None
    quotas = QuotaTable(quota_specs(config, files), shared=lambda: keys.shared)
    quotas.show(metrics)
    _run_beside(stack, quotas.run(), "quotas")
    dispatcher = _make_dispatcher(config, store, metrics, pool, proxy_id, live, quotas)
    stack.push_async_callback(dispatcher.close)
    authenticator = Authenticator(keys, PrincipalLimits(), metrics) if keys.in_use else None
    refusals = Refusals(metrics, None if live is None else live.refused)
    shared = (config, store, metrics, pool, dispatcher, authenticator, refusals)
    parts = _Parts(*shared, quotas, files, trusted, certificates, stack, page, live, tracer)
    grpc, health, grpc_port = await _serve_grpc(parts)
    watch = await stack.enter_async_context(ProcessWatch(health, (), config.stall_timeout))
    await pool.start()
    shown = await _start_upkeep(parts)
    scaling = await start_scaling(config.scaling, store, pool, dispatcher, metrics, proxy_id, stack, internal)
    http, task = await _serve_http(parts, listener, _start_live(parts, proxy_id, shown, scaling))
    host, port = listener.getsockname()[:2]
    scheme = "https" if certificates.front_door else "http"
    logger.info("ready: proxy %s://%s:%d grpc %s:%d", scheme, host, port, config.host, grpc_port)
    if page is not None:
        readiness = PDReadiness(pool, page.status)
        page.registry = metrics.registry
        page.status.follow(watch.healthy, readiness.degraded)
        page.status.cut_off = lambda: pool.cut_off
        pool.subscribe(readiness)
        readiness.workers_changed()
    return _Serving(parts, scaling, health, grpc, http, task)


def _make_dispatcher(
    config: ProxyConfig,
    store: EmbeddingStore,
    metrics: ProxyMetrics,
    pool: WorkerPool,
    proxy_id: str,
    live: LiveData | None,
    quotas: QuotaTable,
) -> Dispatcher:
    return Dispatcher(
        pool,
        store,
        metrics,
        GrpcTransport(pool, proxy_id, stall_timeout=config.stall_timeout),
        proxy_id=proxy_id,
        quotas=quotas,
        media=make_loader(config, metrics, quotas),
        flow_control=config.flow_control,
        skip_held_items=config.skip_held_items,
        store_wait=config.store_wait,
        observer=None if live is None else live.calls,
    )


async def _serve_grpc(parts: _Parts) -> tuple[aio.Server, Health, int]:
    """The gRPC server with its health service, and the port that it listens on."""
    config, quotas = parts.config, parts.quotas
    connections = GrpcConnections(quotas["grpc-connections"], parts.trusted)
    admission = GrpcAdmission(
        quotas, parts.authenticator, parts.refusals, connections=connections, tracer=parts.tracer
    )
    servicer = ProxyServicer(
        parts.dispatcher,
        parts.pool,
        max_images=config.max_images,
        timeout=config.request_timeout,
        max_choices=config.max_choices,
    )
    options = server_options(quotas)
    server, health, port = await _start_grpc(
        config, servicer, admission, options, parts.certificates.front_door
    )
    parts.stack.push_async_callback(server.stop, 1.0)
    connections.port = port
    _run_beside(parts.stack, connections.run(), "gRPC connections")
    return server, health, port


async def _start_upkeep(parts: _Parts) -> PoolMetrics:
    """Starts what is done now and then; the metrics of pools and store that follow it."""
    shown = PoolMetrics(parts.pool, parts.metrics)
    upkeep = Upkeep(parts.config, parts.store, parts.pool, parts.dispatcher, shown.store)
    await upkeep.look()
    upkeep.start()
    parts.stack.push_async_callback(upkeep.stop)
    return shown


def _start_live(
    parts: _Parts, proxy_id: str, shown: PoolMetrics, scaling: Autoscaler | None
) -> Sequence[Route]:
    """The routes of the live data; none with --no-page."""
    if parts.live is None:
        return ()
    parts.stack.push_async_callback(parts.live.stop)
    return parts.live.start(
        parts.dispatcher,
        parts.metrics,
        proxy_id,
        decision=scaling.decision if scaling is not None else lambda pool: None,
        store_memory=lambda: shown.memory,
    )


async def _serve_http(
    parts: _Parts, listener: socket.socket, live: Sequence[Route]
) -> tuple[HttpServer, asyncio.Task[None]]:
    """The HTTP server, which accepts connections by now, and its task."""
    config, metrics = parts.config, parts.metrics
    front = make_app(
        parts.dispatcher,
        parts.pool,
        metrics.registry,
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
        tracer=parts.tracer,
    )
    bodies = parts.quotas["bodies"]
    app: ASGIApp = DeliveryMiddleware(BodyMiddleware(front, bodies), parts.quotas["replies"])
    if parts.authenticator is not None:
        app = AuthMiddleware(app, parts.authenticator)
    app = RefusalMiddleware(app, front.routes, parts.refusals)
    limits = ConnectionLimits(window_seconds=bodies.spec.idle_seconds, body_seconds=bodies.spec.total_seconds)
    certificates = parts.certificates.front_door
    http = HttpServer(app, listener, limits, certificates, parts.quotas, parts.trusted)
    task = await http.start()
    parts.stack.push_async_callback(http.stop, task)
    return http, task


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
    while not stop.is_set():
        try:
            return await EmbeddingStore.connect(url)
        except StoreUnavailable as error:
            if asyncio.get_running_loop().time() > deadline:
                raise ConfigError(f"--store: the store does not answer: {error}") from None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 0.5)
    return None


async def _start_grpc(
    config: ProxyConfig,
    servicer: ProxyServicer,
    admission: GrpcAdmission,
    options: Sequence[tuple[str, Any]],
    certificates: Certificates | None,
) -> tuple[aio.Server, Health, int]:
    server = make_server(interceptors=[admission], options=options)
    proxy_pb2_grpc.add_ProxyServiceServicer_to_server(servicer, server)
    health = Health(server)
    await health.serving()
    try:
        port = listen(server, f"{config.host}:{config.grpc_port}", certificates, mutual=False)
    except RuntimeError as error:
        raise ConfigError(port_error("--grpc-port", config.host, config.grpc_port, error)) from None
    await server.start()
    return server, health, port


async def _until_stopped(http_task: asyncio.Task[None], stop: asyncio.Event) -> None:
    wait = asyncio.create_task(stop.wait())
    await asyncio.wait((wait, http_task), return_when=asyncio.FIRST_COMPLETED)
    wait.cancel()


async def _drain(serving: _Serving, seconds: float) -> None:
    """Clients are sent elsewhere, nothing new is taken, and what is in flight gets up to `seconds` in all.

    Where a load balancer may stand in front, requests on connections that clients have kept are still served,
    for half of that time at most; gRPC clients leave by themselves, with the calls that are not served yet.
    """
    dispatcher, config = serving.parts.dispatcher, serving.parts.config
    deadline = asyncio.get_running_loop().time() + seconds
    if serving.parts.page is not None:
        serving.parts.page.status.drain()
    if serving.parts.live is not None:
        serving.parts.live.drain()
    if serving.scaling is not None:
        serving.scaling.drain()
    await serving.health.leaving()
    if not is_loopback(config.host):
        leaving = asyncio.create_task(serving.grpc.stop(seconds), name="end of gRPC")
        serving.parts.stack.push_async_callback(asyncio.wait, (leaving,), timeout=1.0)
        await serving.http.linger(seconds / 2)
    dispatcher.drain()
    logger.info("draining %d requests", dispatcher.in_flight)
    while dispatcher.in_flight and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.05)

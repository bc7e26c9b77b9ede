"""The process of a worker: its status page and store, and its gRPC server from the port to the drain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from grpc import aio
from prometheus_client import CollectorRegistry

from triptych.base.config import WorkerConfig, check_advertise, check_worker_encryption, is_loopback
from triptych.base.engine_beat import BusyClock
from triptych.base.machine.gpu_load import gpu_reader
from triptych.base.machine.worker_load import read_load
from triptych.base.metrics import show_expiry
from triptych.base.rpc.channels import UnknownCalls, listen, make_server
from triptych.base.rpc.internal_token import InternalToken
from triptych.base.rpc.ports import check_port, refused_port
from triptych.base.rpc.tls.certificates import Certificates, internal_certificates
from triptych.base.status_server import ServiceStatus, StatusServer, status_server
from triptych.base.types import WorkerInfo
from triptych.base.worker_process import Health, ProcessWatch, check_worker, stop_signal
from triptych.protos.error_replies import ErrorReplies
from triptych.registry.registry import Heartbeat, Registry, StoreReach
from triptych.store.embedding_store import EmbeddingStore, connect_configured

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """What a worker's process has before it loads a model: the event of SIGTERM or SIGINT, page and store."""

    stop: asyncio.Event
    page: StatusServer
    store: EmbeddingStore


@asynccontextmanager
async def worker_process(config: WorkerConfig) -> AsyncIterator[WorkerProcess]:
    """A worker's process; ConfigError for what cannot work as configured, before minutes of loading."""
    check_worker(config)
    check_worker_encryption(config.host, config)
    internal_certificates(config)
    check_port(config.host, config.port, "--port")
    stop = stop_signal()
    with status_server(config.host, config.metrics_port, ServiceStatus()) as page:
        store = await connect_configured(config.store)
        try:
            yield WorkerProcess(stop, page, store)
        finally:
            await store.close()


class ServedWorker(Protocol):
    """A worker as its server uses it."""

    @property
    def busy_clocks(self) -> Sequence[BusyClock | None]:
        """The clock of each registration's engine; None where its work is not measured."""

    def start(self) -> None: ...

    def describe_held(self) -> str:
        """What a drain waits for, as in `3 requests`."""

    async def drain(self, grace: float) -> None: ...

    def end_streams(self) -> None:
        """Ends the open streams, so that the server can stop."""

    async def stop(self) -> None: ...


class WorkerServer:
    """The gRPC server, status page and registrations of one worker. The port is bound at once, and answers
    from `serve` on."""

    def __init__(
        self,
        config: WorkerConfig,
        service: str,
        process: WorkerProcess,
        *,
        options: Sequence[tuple[str, int]] = (),
    ) -> None:
        self._service = service
        self._drain_timeout = config.drain_timeout
        self._token = config.internal_token
        self._device = config.device
        self.grpc = make_server(self._token, [UnknownCalls(), ErrorReplies()], options)
        self._certificates = internal_certificates(config)
        self.address = bind(self.grpc, config, self._certificates)
        self.health = Health(self.grpc)
        self._process = process

    def publish(self, metrics: CollectorRegistry) -> None:
        """Serves the worker's metrics on its status page, with the expiry of its certificates."""
        show_expiry(metrics, internal=self._certificates)
        self._process.page.registry = metrics

    @property
    def metrics_port(self) -> int:
        return self._process.page.server_port

    async def serve(
        self,
        worker: ServedWorker,
        infos: Sequence[WorkerInfo],
        watch: ProcessWatch,
        reach: StoreReach | None = None,
        *,
        degraded: Callable[[], Sequence[str]] = tuple,
        renewed: Callable[[WorkerInfo], WorkerInfo] = lambda info: info,
    ) -> None:
        """Starts the worker and serves, registered as `infos`, until the process is to stop, then drains.

        `degraded` is what the worker lacks, `renewed` a registration as it is now.
        """
        registry, status = Registry(self._process.store), self._process.page.status

        def signed(info: WorkerInfo) -> WorkerInfo:
            info = renewed(info)
            return InternalToken(self._token).signed(info) if self._token else info

        self.health.services.update(info.incarnation for info in infos)
        gpu = gpu_reader(self._device)
        for info, clock in zip(infos, worker.busy_clocks, strict=True):
            self.health.loads[info.incarnation] = partial(read_load, clock, gpu)
        beats = [Heartbeat(registry, info, healthy=watch.healthy, renewed=signed) for info in infos]
        # Not `watch.healthy`: a restart of this process does not help a process that this one waits for.
        status.follow(watch.alive, lambda: (*beats[0].degraded(), *degraded()))
        worker.start()
        async with watch, reach or nullcontext():
            try:
                await self.grpc.start()
                await self.health.serving()
                for beat in beats:
                    beat.start()
                status.ready()
                logger.info("ready: %s %s %s", self._service, self.address, infos[0].model)
                await self._process.stop.wait()
                logger.info("draining: %s", worker.describe_held())
                status.drain()
                for beat in beats:
                    await beat.stop()
                await self.health.leaving()
                await worker.drain(self._drain_timeout)
            finally:
                worker.end_streams()
                await self.grpc.stop(1.0)
                await worker.stop()


def bind(server: aio.Server, config: WorkerConfig, certificates: Certificates | None = None) -> str:
    """Binds the worker's port, with TLS where it has certificates; the address at which it is reached."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    try:
        port = listen(server, f"{host}:{config.port}", certificates, mutual=True)
    except RuntimeError as error:
        raise refused_port(config.host, config.port, "--port") from error
    address = config.advertise or f"{host}:{port}"
    check_advertise(address)
    check_worker_encryption(config.host, config)
    if certificates is None and not is_loopback(config.host):
        logger.warning("--insecure: prompts, media and answers come to %s in clear text", address)
    return address

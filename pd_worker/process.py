"""The process around any PD worker: its gRPC server and status page, registration, and drain on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from triptych.config import PDConfig
from triptych.ec_connector.registry.heartbeat import Heartbeat
from triptych.ec_connector.registry.registry import Registry
from triptych.ec_connector.registry.store_reach import StoreReach
from triptych.ec_connector.store.embedding_store import EmbeddingStore
from triptych.metrics import PDMetrics, show_expiry
from triptych.pd_worker.events.streams import EventStreams
from triptych.pd_worker.server import PDServicer
from triptych.progress.progress import ready
from triptych.protos import pd_pb2_grpc
from triptych.rpc.channels import make_server
from triptych.rpc.server_auth import WorkerAuth
from triptych.rpc.tls.certificates import internal_certificates
from triptych.status.status_server import StatusServer
from triptych.types import WorkerInfo
from triptych.worker_process import Health, ProcessWatch, bind

logger = logging.getLogger(__name__)


class ServedWorker(Protocol):
    """A PD worker as its process uses it."""

    @property
    def servicer(self) -> PDServicer: ...

    @property
    def streams(self) -> EventStreams: ...

    def info(self, address: str, metrics_port: int) -> WorkerInfo: ...

    def start(self) -> None: ...

    def fail_unloaded(self) -> None:
        """Ends requests that wait for embeddings, so that they go on elsewhere. Called again and again while
        the process does not reach the store."""

    async def drain(self, grace: float) -> None: ...

    async def stop(self) -> None: ...


class PDProcess:
    """The servers of one PD worker. The port is bound at once, and answers from `serve` on."""

    def __init__(
        self, config: PDConfig, metrics: PDMetrics, store: EmbeddingStore, page: StatusServer
    ) -> None:
        self._config = config
        self._store = store
        self._page = page
        self._auth = WorkerAuth(config.internal_token)
        self._server = make_server(self._auth)
        certificates = internal_certificates(config)
        self._address = bind(self._server, config, certificates)
        show_expiry(metrics.registry, internal=certificates)
        page.registry = metrics.registry
        self.health = Health(self._server)

    async def serve(
        self,
        worker: ServedWorker,
        watch: ProcessWatch,
        stop: asyncio.Event,
        *,
        healthy: Callable[[], bool],
        degraded: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """Serves until `stop`, then drains. `healthy` and `degraded` are what the status page says."""
        info = self._auth.add_worker(worker.info(self._address, self._page.server_port))
        pd_pb2_grpc.add_PDServiceServicer_to_server(worker.servicer, self._server)
        heartbeat = Heartbeat(Registry(self._store), info, healthy=watch.healthy)
        status = self._page.status
        status.follow(healthy, lambda: (*heartbeat.degraded(), *degraded()))
        worker.start()
        reach = StoreReach(self._store.ping, self.health.reaches_store, worker.fail_unloaded)
        async with watch, reach:
            try:
                await self._server.start()
                await self.health.serving()
                heartbeat.start()
                status.ready()
                ready()
                logger.info("ready: pd %s %s", self._address, info.model)
                await stop.wait()
                logger.info("draining: %d requests", worker.streams.unfinished)
                status.drain()
                await heartbeat.stop()
                await self.health.leaving()
                await worker.drain(self._config.drain_timeout)
            finally:
                worker.streams.shut_down()
                await self._server.stop(1.0)
                await worker.stop()

"""The process of a PD worker with --engine vllm: wait for vLLM, serve, register, and drain on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from triptych.config import PDConfig
from triptych.cpu.threads import in_short_lived_thread
from triptych.ec_connector.registry.heartbeat import Heartbeat
from triptych.ec_connector.registry.registry import Registry
from triptych.ec_connector.store.embedding_store import EmbeddingStore, connect_configured
from triptych.metrics import PDMetrics, show_expiry
from triptych.pd_worker.vllm.front_model import FrontModel, load_front_model
from triptych.pd_worker.vllm.health import EngineHealth
from triptych.pd_worker.vllm.http.client import ServerInfo, VLLMClient
from triptych.pd_worker.vllm.settings import check_engine, read_key
from triptych.pd_worker.vllm.worker import VLLMWorker
from triptych.protos import pd_pb2_grpc
from triptych.rpc.channels import make_server
from triptych.rpc.server_auth import WorkerAuth
from triptych.rpc.tls.certificates import internal_certificates
from triptych.status.service_status import ServiceStatus
from triptych.status.status_server import StatusServer, status_server
from triptych.worker_process import Health, ProcessWatch, bind, stop_signal

logger = logging.getLogger(__name__)


async def serve_vllm(config: PDConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains. ConfigError for what cannot work as configured."""
    check_engine(config)
    stop = stop_signal()
    client = VLLMClient(config.engine_url, read_key(config.engine_key_file))
    health = EngineHealth(client, config.stall_timeout)
    try:
        with status_server(config.host, config.metrics_port, ServiceStatus()) as page:
            store = await connect_configured(config.store)
            try:
                info = await _first_answer(health, stop)
                if info is None:
                    return
                logger.info("vLLM %s serves %s, %d tokens", info.version, info.root, info.max_model_len)
                model = await asyncio.to_thread(
                    in_short_lived_thread, load_front_model, config, info.max_model_len
                )
                await _serve(config, model, client, health, store, stop, page)
            finally:
                await store.close()
    finally:
        await client.close()


async def _first_answer(health: EngineHealth, stop: asyncio.Event) -> ServerInfo | None:
    """What the server says once it can be used; None where this process is to end before."""
    stopped = asyncio.create_task(stop.wait())
    answer = asyncio.create_task(health.first_answer())
    await asyncio.wait((stopped, answer), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if answer.done():
        return answer.result()
    answer.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await answer
    return None


async def _serve(
    config: PDConfig,
    model: FrontModel,
    client: VLLMClient,
    engine_health: EngineHealth,
    store: EmbeddingStore,
    stop: asyncio.Event,
    page: StatusServer,
) -> None:
    auth = WorkerAuth(config.internal_token)
    server = make_server(auth)
    certificates = internal_certificates(config)
    address = bind(server, config, certificates)
    metrics = PDMetrics(model.name)
    show_expiry(metrics.registry, internal=certificates)
    page.registry = metrics.registry
    worker = VLLMWorker(config, model, client, engine_health, store, metrics)
    info = auth.add_worker(worker.info(address, page.server_port))
    pd_pb2_grpc.add_PDServiceServicer_to_server(worker.servicer, server)
    health = Health(server)
    watch = ProcessWatch(health, [], config.stall_timeout, serves=lambda: engine_health.up)
    heartbeat = Heartbeat(Registry(store), info, healthy=watch.healthy)
    # Not `healthy`: a restart of this process does not help a server that is away.
    page.status.follow(watch.alive, lambda: (*heartbeat.degraded(), *(() if engine_health.up else ("vLLM",))))
    worker.start()
    async with watch:
        try:
            await server.start()
            await health.serving()
            heartbeat.start()
            page.status.ready()
            logger.info("ready: pd %s %s", address, model.name)
            await stop.wait()
            logger.info("draining: %d requests", worker.streams.unfinished)
            page.status.drain()
            await heartbeat.stop()
            await health.leaving()
            await worker.drain(config.drain_timeout)
        finally:
            worker.streams.shut_down()
            await server.stop(1.0)
            await worker.stop()

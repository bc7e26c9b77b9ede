"""The process of a PD worker: load, serve, register, and drain on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import uuid

from triptych.config import PDConfig
from triptych.cpu.step_pacer import StepPacer, step_pacer
from triptych.cpu.threads import in_short_lived_thread
from triptych.ec_connector.registry.heartbeat import Heartbeat
from triptych.ec_connector.registry.registry import Registry
from triptych.ec_connector.store.embedding_store import EmbeddingStore, connect_configured
from triptych.metrics import PDMetrics, show_expiry
from triptych.models.layers import before_each_layer
from triptych.pd_worker.attention.flex_start import slow_while_compiling
from triptych.pd_worker.model_loading import LoadedModel, load_model
from triptych.pd_worker.ranks.share import decoder_threads_of_rank, share_of_rank
from triptych.pd_worker.vllm.service import serve_vllm
from triptych.pd_worker.worker import PDWorker
from triptych.progress.progress import ready
from triptych.protos import pd_pb2_grpc
from triptych.rpc.channels import make_server
from triptych.rpc.server_auth import WorkerAuth
from triptych.rpc.tls.certificates import internal_certificates
from triptych.status.service_status import ServiceStatus
from triptych.status.status_server import StatusServer, status_server
from triptych.tracing.start import start_tracer
from triptych.worker_process import Health, ProcessWatch, bind, check_worker, stop_signal

logger = logging.getLogger(__name__)


async def run(config: PDConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains. ConfigError for what cannot work as configured."""
    check_worker(config)
    if config.engine == "vllm":
        await serve_vllm(config)
        return
    config = share_of_rank(config)
    stop = stop_signal()
    with status_server(config.host, config.metrics_port, ServiceStatus()) as page:
        store = await connect_configured(config.store)
        try:
            model = await asyncio.to_thread(in_short_lived_thread, load_model, config)
            await _serve(config, model, store, stop, page)
        finally:
            await store.close()


async def _serve(
    config: PDConfig, model: LoadedModel, store: EmbeddingStore, stop: asyncio.Event, page: StatusServer
) -> None:
    auth = WorkerAuth(config.internal_token)
    server = make_server(auth)
    certificates = internal_certificates(config)
    address = bind(server, config, certificates)
    metrics = PDMetrics(model.name)
    show_expiry(metrics.registry, internal=certificates)
    page.registry = metrics.registry
    pacer = _step_pacer(config, model)
    incarnation = uuid.uuid4().hex
    tracer = start_tracer(config, "pd", incarnation)
    worker = PDWorker(config, model, metrics, pacer=pacer, tracer=tracer, incarnation=incarnation)
    info = auth.add_worker(worker.info(address, page.server_port))
    pd_pb2_grpc.add_PDServiceServicer_to_server(worker.servicer, server)
    health = Health(server)
    before_each_layer(model.decoder.module, worker.engine.beat.tick)
    before_each_layer(model.decoder.module, pacer.choose_threads)
    if config.attention_backend == "flex":
        slow_while_compiling(worker.engine.beat)
    others = [] if model.ranks is None else model.ranks.beats
    watch = ProcessWatch(health, [worker.engine.beat, *others], config.stall_timeout)
    heartbeat = Heartbeat(Registry(store), info, healthy=watch.healthy)
    page.status.follow(watch.healthy, heartbeat.degraded)
    worker.start()
    async with watch:
        try:
            await server.start()
            await health.serving()
            heartbeat.start()
            page.status.ready()
            ready()
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
            pacer.close()
            if tracer is not None:
                await asyncio.to_thread(tracer.close)


def _step_pacer(config: PDConfig, model: LoadedModel) -> StepPacer:
    most = config.tensor_parallel * decoder_threads_of_rank(config, model.decoder.geometry.hidden_size)
    # Ranks are processes with threads of their own.
    follows = config.spare_cores and config.tensor_parallel == 1
    return step_pacer(
        config.core_page,
        config.core_slot,
        max(1, most // 2) if follows else most,
        most=most,
        interval=config.step_interval,
        own_core=config.keep_core,
    )

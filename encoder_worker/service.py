"""The encoder worker's process: load, warm up, serve, register, and drain on SIGTERM."""

from __future__ import annotations

import asyncio
import logging

from triptych.config import EncoderConfig
from triptych.cpu.step_pacer import StepPacer, step_pacer
from triptych.cpu.threads import threads_of_rank, tower_threads, use_threads
from triptych.ec_connector.registry.heartbeat import Heartbeat
from triptych.ec_connector.registry.matching import ROW_WIDTH, PDModels, described
from triptych.ec_connector.registry.registry import Registry
from triptych.ec_connector.registry.store_reach import StoreReach
from triptych.ec_connector.store.control import StoreUnavailable
from triptych.ec_connector.store.embedding_store import EmbeddingStore, connect_configured
from triptych.encoder_worker.graphs.metrics import count_graphs
from triptych.encoder_worker.loading import parameter_bytes
from triptych.encoder_worker.ranks.metrics import RankMetrics
from triptych.encoder_worker.ranks.starting import load_ranks
from triptych.encoder_worker.ranks.tower import DataParallelTower
from triptych.encoder_worker.worker import EncoderWorker, WorkerIdentity, worker_identity
from triptych.engine_beat import EngineBeat
from triptych.machine.resources import threads_of_one_worker
from triptych.machine.worker_kind import worker_kind
from triptych.metrics import EncoderMetrics, show_expiry
from triptych.models.base import EncoderSide
from triptych.models.identity import ModelIdentity
from triptych.models.layers import before_each_layer
from triptych.progress.progress import ready
from triptych.protos import encoder_pb2_grpc
from triptych.rpc.channels import make_server
from triptych.rpc.server_auth import WorkerAuth
from triptych.rpc.tls.certificates import Certificates, internal_certificates
from triptych.status.service_status import ServiceStatus
from triptych.status.status_server import StatusServer, status_server
from triptych.tracing.start import start_tracer
from triptych.types import WorkerInfo
from triptych.worker_process import Health, ProcessWatch, bind, check_worker, stop_signal

logger = logging.getLogger(__name__)

#: Streams that wait for media room are not read. Without BDP probing each of them buffers at most 64 KiB.
UNREAD_STREAMS = [("grpc.http2.bdp_probe", 0)]


async def run(config: EncoderConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains. ConfigError for what cannot work as configured."""
    check_worker(config)
    stop = stop_signal()
    use_threads(threads_of_rank(tower_threads(config.threads, config.cpus), config.encoder_data_parallel))
    with status_server(config.host, config.metrics_port, ServiceStatus()) as page:
        store = await connect_configured(config.store)
        try:
            encoder, model = await asyncio.to_thread(load_ranks, config)
            try:
                await _serve(config, encoder, model, store, stop, page)
            finally:
                if isinstance(encoder, DataParallelTower):
                    await asyncio.to_thread(encoder.close)
        finally:
            await store.close()


async def _serve(
    config: EncoderConfig,
    encoder: EncoderSide,
    model: ModelIdentity,
    store: EmbeddingStore,
    stop: asyncio.Event,
    page: StatusServer,
) -> None:
    auth = WorkerAuth(config.internal_token)
    server = make_server(auth, options=UNREAD_STREAMS)
    certificates = internal_certificates(config)
    address = bind(server, config, certificates)
    identity = worker_identity(config, model, address)
    metrics = _metrics(identity, encoder, certificates)
    pacer = _step_pacer(config)
    tracer = start_tracer(config, "encoder", identity.incarnation)
    worker = EncoderWorker(config, identity, encoder, store, metrics=metrics, pacer=pacer, tracer=tracer)
    encoder_pb2_grpc.add_EncoderServiceServicer_to_server(worker.servicer, server)
    before_each_layer(encoder.module, pacer.choose_threads)
    beats = _watched(encoder, worker.beat, metrics, identity.model_name)
    health = Health(server)
    watch = ProcessWatch(health, beats, config.stall_timeout)
    page.registry = metrics.registry
    worker.start()
    reach = StoreReach(store.ping, health.reaches_store, worker.jobs.fail_all)
    worker.jobs.reaches_store = lambda: reach.reaches
    async with watch, reach:
        try:
            info = auth.add_worker(worker_info(config, identity, page.server_port, encoder.width))
            registry = Registry(store)
            await warn_of_mismatch(registry, info)
            heartbeat = Heartbeat(registry, info, healthy=watch.healthy)
            page.status.follow(watch.healthy, heartbeat.degraded)
            await server.start()
            await health.serving()
            heartbeat.start()
            page.status.ready()
            ready()
            logger.info("ready: encoder %s %s", address, identity.model_name)
            await stop.wait()
            logger.info("draining: %d open jobs", len(worker.jobs))
            page.status.drain()
            await heartbeat.stop()
            await health.leaving()
            await worker.drain(config.drain_timeout)
            await server.stop(1.0)
        finally:
            await worker.stop()
            if tracer is not None:
                await asyncio.to_thread(tracer.close)


def _metrics(
    identity: WorkerIdentity, encoder: EncoderSide, certificates: Certificates | None
) -> EncoderMetrics:
    metrics = EncoderMetrics(identity.model_name)
    show_expiry(metrics.registry, internal=certificates)
    metrics.parameter_bytes.set(parameter_bytes(encoder))
    return metrics


def _step_pacer(config: EncoderConfig) -> StepPacer:
    ranks = config.encoder_data_parallel
    threads = ranks * threads_of_rank(tower_threads(config.threads, config.cpus), ranks)
    # Ranks are processes with threads of their own.
    most = threads_of_one_worker() if config.spare_cores and ranks == 1 else threads
    return step_pacer(config.core_page, config.core_slot, threads, most=most)


def _watched(
    encoder: EncoderSide, beat: EngineBeat, metrics: EncoderMetrics, model_name: str
) -> list[EngineBeat]:
    """The beats of the tower, one for each rank: every layer ticks the worker's own."""
    before_each_layer(encoder.module, beat.tick)
    if not isinstance(encoder, DataParallelTower):
        return [beat]
    encoder.attach(RankMetrics(metrics, model_name, encoder.ranks), beat.tick)
    # Those of rank 0: each rank has graphs of its own.
    count_graphs(encoder.inner, metrics, model_name)
    return [beat, *encoder.beats]


async def warn_of_mismatch(registry: Registry, info: WorkerInfo) -> None:
    """Logs why the PD workers that are registered now do not take this worker's embeddings, if so."""
    try:
        found = PDModels.of(await registry.workers()).mismatch(info)
    except StoreUnavailable as error:
        logger.warning("not compared with the PD workers: %s", error)
        return
    if found is not None:
        logger.warning("the embeddings of this %s are not taken: %s", described(info), found.text)


def worker_info(
    config: EncoderConfig, identity: WorkerIdentity, metrics_port: int, row_width: int
) -> WorkerInfo:
    """The worker's registration."""
    return WorkerInfo(
        address=identity.address,
        pool="encoder",
        incarnation=identity.incarnation,
        model_key=identity.model_key,
        model=identity.model_name,
        namespaces=(identity.namespace,),
        capacity={
            "plan_credit": config.plan_credit,
            "tower_credit": config.tower_places,
            "metrics_port": metrics_port,
            ROW_WIDTH: row_width,
        },
        modality=identity.modality,
        kind=worker_kind(
            config.worker_kind,
            config.device,
            tower_threads(config.threads, config.cpus),
            ranks=config.encoder_data_parallel,
        ),
    )

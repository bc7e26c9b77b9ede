"""The encoder worker and its process: load, warm up, serve, register, and drain on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import dataclass
from pathlib import Path

from triptych.base.config import MIB, EncoderConfig
from triptych.base.cpu.step_pacer import StepPacer, step_pacer
from triptych.base.cpu.threads import media_threads, threads_of_rank, tower_threads, use_threads
from triptych.base.engine_beat import BusyClock, EngineBeat
from triptych.base.machine.resources import threads_of_one_worker, worker_kind
from triptych.base.metrics import EncoderMetrics
from triptych.base.tracing.start import worker_tracer
from triptych.base.tracing.tracer import Tracer
from triptych.base.types import INT8, SCALE_BYTES, WorkerInfo
from triptych.base.worker_process import ProcessWatch
from triptych.ec_connector.base import DirectTransfer, ECTransferConfig, OutputCache
from triptych.ec_connector.connectors.memory import MemoryStore
from triptych.encoder_worker.engine import Encoded, EncoderEngine
from triptych.encoder_worker.graphs.graph_encoder import count_graphs
from triptych.encoder_worker.job_spec import ItemFormat
from triptych.encoder_worker.jobs.job import EncodeJob
from triptych.encoder_worker.jobs.loop import JobLoop
from triptych.encoder_worker.jobs.same_rows import SameRows
from triptych.encoder_worker.jobs.segments import ErrandPlaces, SegmentPlanner
from triptych.encoder_worker.jobs.single_flight import JobSaves, SingleFlight
from triptych.encoder_worker.jobs.table import EncodeJobs, JobBounds, JobMetrics, JobStreams
from triptych.encoder_worker.loading import parameter_bytes, scales_of
from triptych.encoder_worker.media.audio import AudioLimits
from triptych.encoder_worker.media.budget import MediaBudget
from triptych.encoder_worker.media.cost import slowness
from triptych.encoder_worker.media.preparer import Preparer
from triptych.encoder_worker.media.video import VideoLimits
from triptych.encoder_worker.ranks.tower import DataParallelTower, RankMetrics, load_ranks
from triptych.encoder_worker.scheduler import EncoderScheduler
from triptych.encoder_worker.server import EncoderServicer
from triptych.models.base import EncoderSide
from triptych.models.defaults import start_lock
from triptych.models.identity import ModelIdentity
from triptych.models.registry import before_each_layer
from triptych.protos import encoder_pb2_grpc
from triptych.protos.encoder_pb2 import EncodeEvent
from triptych.registry.lease_keeper import LeaseKeeper
from triptych.registry.leases import Leases
from triptych.registry.matching import DIRECT, ROW_WIDTH, PDModels, described
from triptych.registry.registry import Registry, StoreReach
from triptych.registry.worker_server import WorkerProcess, WorkerServer, worker_process
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore

logger = logging.getLogger(__name__)

#: Streams that wait for media room are not read. Without BDP probing each of them buffers at most 64 KiB.
UNREAD_STREAMS = [("grpc.http2.bdp_probe", 0)]
#: Bytes of the latest encoder outputs kept in host memory.
OUTPUT_CACHE_BYTES = 64 * MIB
#: Accepted jobs without a plan, as a multiple of the plan credit.
CREDIT_SLACK = 4


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Identity of one worker process: its model and namespace, its address and incarnation."""

    namespace: str
    model_key: str
    model_name: str
    address: str
    incarnation: str
    modality: str = "image"


def worker_identity(config: EncoderConfig, model: ModelIdentity, address: str) -> WorkerIdentity:
    """A new identity for a worker of this checkpoint at `address`."""
    name = config.served_model_name or Path(config.model).resolve().name
    return WorkerIdentity(model.namespace, model.model_key, name, address, uuid.uuid4().hex, model.modality)


class EncoderWorker:
    """An encoder worker without its process: everything between gRPC server and store, in the running loop.

    `transfer` configures the EC connector, by default over the store. An in-process memory store is also used
    for look-ups and replaces the output cache. `pacer` is entered while the tower computes. The caller
    closes the `tracer`.
    """

    def __init__(
        self,
        config: EncoderConfig,
        identity: WorkerIdentity,
        encoder: EncoderSide,
        store: EmbeddingStore,
        *,
        metrics: EncoderMetrics,
        lease_term: float = 5.0,
        transfer: ECTransferConfig | None = None,
        pacer: StepPacer | None = None,
        thread_per_batch: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        transfer = transfer or transfer_config(config, identity)
        if tracer is not None:
            transfer = transfer.traced()
        self._config, self._identity = config, identity
        #: The paths besides the store; None without.
        self.direct = transfer.direct if transfer.connector == "redis" else None
        memory = transfer.store if isinstance(transfer.store, MemoryStore) else None
        outputs = OutputCache(OUTPUT_CACHE_BYTES) if memory is None else memory
        scheduler, changed = _scheduler(config), asyncio.Event()
        #: Bytes of decoded media, which have their room beside the pixels that are kept.
        self.decoded = MediaBudget(
            config.prepared_memory, beside=lambda: scheduler.pinned_bytes, taken=scheduler.shrink
        )
        scheduler.decoded_bytes = lambda: self.decoded.nbytes
        metrics.decoded_bytes.set_function(scheduler.decoded_bytes)
        self._preparer = _preparer(config, encoder, self.decoded)
        job_metrics = JobMetrics(metrics, identity.model_name)
        self._engine = EncoderEngine(
            encoder, transfer, outputs, pacer, thread_per_batch=thread_per_batch, on_batch=job_metrics.batch
        )
        self._leases = _lease_keeper(store, identity, self._engine, lease_term)
        metrics.busy.set_function(self.beat.busy.share)
        metrics.leases_held.set_function(lambda: self._leases.held)
        count_graphs(encoder, metrics, identity.model_name)
        self._format = format = _item_format(config, identity, encoder)
        self.jobs = EncodeJobs(
            JobBounds(unplanned_jobs=CREDIT_SLACK * config.plan_credit),
            scheduler,
            self._leases,
            job_metrics,
            changed,
        )
        streams = JobStreams(self.jobs, scheduler, self._preparer, job_metrics, changed)
        self._saves = JobSaves(self.jobs, self._engine, job_metrics)
        self._loop = JobLoop(
            self.jobs,
            scheduler,
            streams,
            SingleFlight(self.jobs, store if memory is None else memory, self._leases, identity.namespace),
            self._preparer,
            self._engine,
            outputs,
            self._saves,
            format=format,
            metrics=job_metrics,
            changed=changed,
            producers=transfer.producers,
            same_rows=SameRows(store, config.embedding_ttl) if memory is None else None,
            decoded=self.decoded,
        )
        self.media = MediaBudget(config.encoder_media_memory)
        places = ErrandPlaces(scheduler, job_metrics, changed)
        splitter = SegmentPlanner(self._preparer, self._engine, config.video_segment_frames, places)
        self.servicer = EncoderServicer(streams, self.media, format, tracer, splitter)

    @property
    def beat(self) -> EngineBeat:
        """The engine's beat, for the watchdog."""
        return self._engine.beat

    @property
    def busy_clocks(self) -> tuple[BusyClock]:
        return (self.beat.busy,)

    def info(self, metrics_port: int) -> WorkerInfo:
        """The worker's registration."""
        config, identity = self._config, self._identity
        threads, ranks = tower_threads(config.threads, config.cpus), config.encoder_data_parallel
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
                ROW_WIDTH: self._format.width,
                DIRECT: int(self.direct is not None and self.direct.memory > 0),
            },
            modality=identity.modality,
            kind=worker_kind(config.worker_kind, config.device, threads, ranks=ranks),
        )

    def follow(self, reach: StoreReach) -> None:
        """What needs the store follows whether this process reaches it."""
        self.jobs.reaches_store = lambda: reach.reaches
        if self.direct is not None:
            self.direct.reaches_store = self.jobs.reaches_store

    def start(self) -> None:
        """Starts the engine's thread and the jobs' loop."""
        loop = asyncio.get_running_loop()

        def emit(mm_hash: str, event: Encoded | EncodeEvent) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._saves.on_engine, mm_hash, event)

        self._engine.start(emit)
        self._loop.start()

    def describe_held(self) -> str:
        return f"{len(self.jobs)} open jobs"

    async def drain(self, grace: float) -> None:
        """Refuses new jobs and finishes those with permission, for at most `grace` seconds."""
        await self.jobs.drain(grace)

    def end_streams(self) -> None:
        """Streams end with their jobs, which a drain has ended."""

    async def stop(self) -> None:
        """Ends threads and connections, and releases the leases."""
        await self.jobs.drain(0)
        await self._loop.stop()
        await self._leases.close()
        await asyncio.to_thread(self._engine.stop)
        self._preparer.close()


def _preparer(config: EncoderConfig, encoder: EncoderSide, decoded: MediaBudget) -> Preparer:
    seconds = config.max_decode_seconds
    return Preparer(
        encoder,
        max_pixels=config.max_image_pixels,
        audio=AudioLimits(config.max_audio_seconds, seconds),
        video=VideoLimits(
            config.max_video_seconds,
            config.max_image_pixels,
            config.max_video_pixels,
            decode_seconds=seconds,
        ),
        decoded=decoded,
        threads=media_threads(config.decode_threads),
    )


def _lease_keeper(
    store: EmbeddingStore, identity: WorkerIdentity, engine: EncoderEngine, term: float
) -> LeaseKeeper:
    return LeaseKeeper(
        Leases(store),
        address=identity.address,
        incarnation=identity.incarnation,
        last_progress=engine.last_progress,
        term=term,
    )


def _scheduler(config: EncoderConfig) -> EncoderScheduler[EncodeJob]:
    return EncoderScheduler(
        prepared_memory=config.prepared_memory,
        batch_patches=config.batch_patches * config.encoder_data_parallel,
        preparations=media_threads(config.decode_threads),
        tower_credit=max(1, config.tower_places),
    )


def _item_format(config: EncoderConfig, identity: WorkerIdentity, encoder: EncoderSide) -> ItemFormat:
    dtype, scales = str(encoder.dtype).removeprefix("torch."), 0
    if config.ec_store_rows == INT8:
        dtype, scales = INT8, scales_of(Path(config.model), encoder.width)
        given, stored = encoder.width * encoder.dtype.itemsize, encoder.width + SCALE_BYTES * scales
        logger.info("embeddings are stored in 8 bits: %d bytes a row in place of %d", stored, given)
    return ItemFormat(identity.namespace, encoder.modality, encoder.width, dtype, scales)


def transfer_config(config: EncoderConfig, identity: WorkerIdentity) -> ECTransferConfig:
    """The config of this worker's connector; outputs are in host memory when they are saved."""
    direct = DirectTransfer.of(config)
    if direct is not None:
        direct.memory = config.ec_transfer_memory
        direct.host, direct.port = config.host, config.ec_transfer_port
        direct.advertise = config.advertise.rpartition(":")[0]
    return ECTransferConfig(
        connector="redis",
        store_url=config.store,
        model_key=identity.model_key,
        namespace=identity.namespace,
        ttl=config.embedding_ttl,
        ec_role="producer",
        direct=direct,
    )


async def run(config: EncoderConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains. ConfigError for what cannot work as configured."""
    async with worker_process(config) as process:
        use_threads(threads_of_rank(tower_threads(config.threads, config.cpus), config.encoder_data_parallel))
        starting = await asyncio.to_thread(start_lock, config)
        encoder, model = await asyncio.to_thread(load_ranks, config)
        await asyncio.to_thread(slowness)
        starting.release()
        try:
            await _serve(config, encoder, model, process)
        finally:
            if isinstance(encoder, DataParallelTower):
                await asyncio.to_thread(encoder.close)


async def _serve(
    config: EncoderConfig, encoder: EncoderSide, model: ModelIdentity, process: WorkerProcess
) -> None:
    server, store = WorkerServer(config, "encoder", process, options=UNREAD_STREAMS), process.store
    identity = worker_identity(config, model, server.address)
    metrics = EncoderMetrics(identity.model_name)
    metrics.parameter_bytes.set(parameter_bytes(encoder))
    server.publish(metrics.registry)
    pacer = _step_pacer(config)
    async with worker_tracer(config, "encoder", identity.incarnation) as tracer:
        worker = EncoderWorker(config, identity, encoder, store, metrics=metrics, pacer=pacer, tracer=tracer)
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server(worker.servicer, server.grpc)
        before_each_layer(encoder.module, pacer.choose_threads)
        beats = watched(encoder, worker.beat, metrics, identity.model_name)
        watch = ProcessWatch(server.health, beats, config.stall_timeout)
        info = worker.info(server.metrics_port)
        await warn_of_mismatch(Registry(store), info)
        reach = StoreReach(store.ping, server.health.reaches_store, worker.jobs.fail_all)
        worker.follow(reach)
        await server.serve(worker, [info], watch, reach)


def _step_pacer(config: EncoderConfig) -> StepPacer:
    ranks = config.encoder_data_parallel
    threads = ranks * threads_of_rank(tower_threads(config.threads, config.cpus), ranks)
    # Ranks are processes with threads of their own.
    maximum = threads_of_one_worker() if config.spare_cores and ranks == 1 else threads
    return step_pacer(config.core_page, config.core_slot, threads, maximum=maximum)


def watched(
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
        mismatch = PDModels.of(await registry.workers()).mismatch(info)
    except StoreUnavailable as error:
        logger.warning("not compared with the PD workers: %s", error)
        return
    if mismatch is not None:
        logger.warning("the embeddings of this %s are not taken: %s", described(info), mismatch.text)

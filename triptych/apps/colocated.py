"""A replica: tower and decoder in one process on one device, or as ranks on several, in both pools."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import deque
from dataclasses import dataclass, replace
from types import TracebackType

from triptych.base.config import ColocatedConfig
from triptych.base.cpu.step_pacer import StepPacer
from triptych.base.cpu.threads import decoder_threads, in_short_lived_thread, threads_of_rank, use_threads
from triptych.base.engine_beat import BusyClock, EngineBeat
from triptych.base.errors import InternalError
from triptych.base.machine.start_lock import StartLock
from triptych.base.metrics import EncoderMetrics, PDMetrics, new_registry
from triptych.base.tracing.context import Producers
from triptych.base.tracing.start import worker_tracer
from triptych.base.tracing.tracer import Tracer
from triptych.base.types import WorkerInfo
from triptych.base.worker_process import ProcessWatch
from triptych.ec_connector.base import ECTransferConfig
from triptych.ec_connector.connectors.memory import MemoryStore
from triptych.encoder_worker import loading as encoder_loading
from triptych.encoder_worker import service as encoder_service
from triptych.encoder_worker.ranks.tower import DataParallelTower, load_ranks
from triptych.models.base import EncoderSide
from triptych.models.defaults import start_lock
from triptych.models.identity import ModelIdentity
from triptych.models.registry import before_each_layer
from triptych.pd_worker import native as pd_worker
from triptych.pd_worker.ranks.share import share_of_rank
from triptych.protos import encoder_pb2_grpc, pd_pb2_grpc
from triptych.registry.worker_server import WorkerProcess, WorkerServer, worker_process
from triptych.store.embedding_store import EmbeddingStore


class DeviceLock(StepPacer):
    """A first-in-first-out lock, held by `with`: two engines that both wait for it alternate.

    A wait of more than `patience` seconds is an InternalError: the other engine's step hangs.
    """

    def __init__(self, patience: float = 600.0) -> None:
        self._patience = patience
        self._changed = threading.Condition()
        #: Of the thread that holds it, and of those that wait behind it.
        self._turns: deque[object] = deque()

    @property
    def waiting(self) -> int:
        """How many threads wait."""
        return max(0, len(self._turns) - 1)

    def __enter__(self) -> None:
        turn = object()
        with self._changed:
            self._turns.append(turn)
            if not self._changed.wait_for(lambda: self._turns[0] is turn, self._patience):
                self._turns.remove(turn)
                raise InternalError(f"the device was not free for {self._patience:g} s")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._turns.popleft()
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class LoadedReplica:
    """Both sides of one checkpoint."""

    encoder: EncoderSide
    encoder_model: ModelIdentity
    decoder: pd_worker.LoadedModel


async def run(config: ColocatedConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains. ConfigError for what cannot work as configured."""
    async with worker_process(config.pd) as process:
        config = replace(config, pd=share_of_rank(config.pd))
        starting = await asyncio.to_thread(start_lock, config.pd)
        model = await asyncio.to_thread(in_short_lived_thread, load, config)
        try:
            await _serve(config, model, process, starting)
        finally:
            # A decoder's ranks end with its engine.
            if isinstance(model.encoder, DataParallelTower):
                await asyncio.to_thread(model.encoder.close)


def load(config: ColocatedConfig) -> LoadedReplica:
    """Tower and decoder of the checkpoint; ConfigError for one that cannot be served as configured."""
    encoder, identity = load_ranks(config.encoder)
    own = encoder.inner if isinstance(encoder, DataParallelTower) else encoder
    peak = encoder_loading.activation_bytes(config.encoder, own)
    decoder = pd_worker.load_model(config.pd, other_peak=peak)
    # The same devices: both sides use all of their threads, each in its turn.
    ranks = max(config.pd.tensor_parallel, config.encoder.encoder_data_parallel)
    threads = decoder_threads(config.pd.threads, decoder.decoder.geometry.hidden_size)
    use_threads(threads_of_rank(threads, ranks))
    return LoadedReplica(encoder, identity, decoder)


async def _serve(
    config: ColocatedConfig, model: LoadedReplica, process: WorkerProcess, starting: StartLock
) -> None:
    server = WorkerServer(config.pd, "colocated", process, options=encoder_service.UNREAD_STREAMS)
    async with worker_tracer(config.pd, "colocated", uuid.uuid4().hex) as tracer:
        replica = Replica(config, model, process.store, server.address, tracer)
        starting.release()
        server.publish(replica.registry)
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server(replica.encoder.servicer, server.grpc)
        pd_pb2_grpc.add_PDServiceServicer_to_server(replica.pd.servicer, server.grpc)
        watch = ProcessWatch(server.health, replica.engines, config.pd.stall_timeout)
        await server.serve(replica, replica.infos(server.metrics_port), watch)


class Replica:
    """An EncoderWorker and a PDWorker with one lock on their devices; belongs to the running event loop.

    Other ranks compute only while rank 0's side has the lock. `engines` are watched.
    """

    def __init__(
        self,
        config: ColocatedConfig,
        model: LoadedReplica,
        store: EmbeddingStore,
        address: str,
        tracer: Tracer | None = None,
    ) -> None:
        self._address = address
        identity = encoder_service.worker_identity(config.encoder, model.encoder_model, address)
        self.registry = new_registry()
        metrics = EncoderMetrics(model.decoder.name, self.registry)
        saving, loading = _transfers(config, identity, model.decoder.identity)
        if tracer is not None:
            producers = Producers()
            saving, loading = (replace(one, producers=producers) for one in (saving, loading))
        device = DeviceLock()
        self.encoder = encoder_service.EncoderWorker(
            config.encoder,
            identity,
            model.encoder,
            store,
            metrics=metrics,
            transfer=saving,
            pacer=device,
            thread_per_batch=model.encoder.device.type == "cpu",
            tracer=tracer,
        )
        pd_metrics = PDMetrics(model.decoder.name, self.registry, metrics.parameter_bytes)
        self.pd = pd_worker.NativeWorker(
            config.pd, model.decoder, pd_metrics, transfer=loading, pacer=device, tracer=tracer
        )
        metrics.parameter_bytes.inc(encoder_loading.parameter_bytes(model.encoder))
        before_each_layer(model.decoder.decoder.module, self.pd.engine.beat.tick)
        self.engines: list[EngineBeat] = [
            *encoder_service.watched(model.encoder, self.encoder.beat, metrics, identity.model_name),
            self.pd.engine.beat,
            *(() if model.decoder.ranks is None else model.decoder.ranks.beats),
        ]

    @property
    def busy_clocks(self) -> tuple[BusyClock, BusyClock]:
        return self.encoder.beat.busy, self.pd.engine.beat.busy

    def infos(self, metrics_port: int) -> tuple[WorkerInfo, WorkerInfo]:
        """Its registrations, one in each pool."""
        return self.encoder.info(metrics_port), self.pd.info(self._address, metrics_port)

    def start(self) -> None:
        self.encoder.start()
        self.pd.start()

    def describe_held(self) -> str:
        return f"{self.pd.describe_held()}, {self.encoder.describe_held()}"

    def end_streams(self) -> None:
        self.pd.end_streams()

    async def drain(self, grace: float) -> None:
        """Finishes what is held, for at most `grace` seconds; everything new is refused."""
        await asyncio.gather(self.pd.drain(grace), self.encoder.drain(grace))

    async def stop(self) -> None:
        """Ends both engines and gives everything back."""
        await self.encoder.stop()
        await self.pd.stop()


def _transfers(
    config: ColocatedConfig, identity: encoder_service.WorkerIdentity, model: ModelIdentity
) -> tuple[ECTransferConfig, ECTransferConfig]:
    """How embeddings are saved, and how they are loaded."""
    both = (
        encoder_service.transfer_config(config.encoder, identity),
        pd_worker.transfer_config(config.pd, model),
    )
    if config.connector == "redis":
        return both
    memory = MemoryStore(config.store_memory)
    saving, loading = (replace(one, connector=config.connector, store=memory) for one in both)
    return saving, loading

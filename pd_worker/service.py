"""The PD worker's process: load, serve, register, and drain on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from triptych.config import PDConfig, check_advertise, check_bind, format_size
from triptych.cpu.step_pacer import StepPacer, step_pacer
from triptych.cpu.threads import decoder_threads, in_short_lived_thread, use_threads
from triptych.ec_connector.base import ECTransferConfig
from triptych.ec_connector.registry.heartbeat import Heartbeat
from triptych.ec_connector.registry.registry import Registry
from triptych.ec_connector.store.embedding_store import EmbeddingStore, connect_configured
from triptych.errors import Unavailable
from triptych.machine.device_memory import memory_of
from triptych.metrics import PDMetrics
from triptych.models.base import DecoderSide, GenerationDefaults
from triptych.models.checkpoint.support import check_supported, wanted_by_flags
from triptych.models.identity import ModelIdentity, model_identity
from triptych.models.layers import before_each_layer
from triptych.models.registry import generation_defaults, load_decoder, resolve_device, resolve_dtype
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.attention.flex_start import prepare, slow_while_compiling
from triptych.pd_worker.engine import Engine
from triptych.pd_worker.events.streams import Outbox
from triptych.pd_worker.events.token_texts import TokenTexts
from triptych.pd_worker.frontend.encdec_prompt import EncDecPrompts
from triptych.pd_worker.frontend.grammar import GrammarCompiler
from triptych.pd_worker.frontend.input_processor import Intake
from triptych.pd_worker.frontend.prompt import PromptBuilder, open_checkpoint
from triptych.pd_worker.runner.capacity import max_model_len, num_kv_blocks
from triptych.pd_worker.runner.memory_profile import size_kv_memory
from triptych.pd_worker.server import MAX_WAITING, PDServicer
from triptych.protos import pd_pb2_grpc
from triptych.rpc.channels import make_server
from triptych.rpc.server_auth import WorkerAuth
from triptych.types import WorkerInfo
from triptych.watchdog import check_stall_timeout
from triptych.worker_process import Health, WorkerWatch, bind, metrics_server, stop_signal

logger = logging.getLogger(__name__)

#: Seconds that the requests held get after SIGTERM; what is left then goes on at another worker.
DRAIN_SECONDS = 30.0
#: How often proxies hear how far the engine is.
BEAT_SECONDS = 1.0
_SWEEP_SECONDS = 0.25
_POLL_SECONDS = 0.02
_INTAKE_THREADS = 2


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint's decoder side and what its files say."""

    path: Path
    name: str
    decoder: DecoderSide
    identity: ModelIdentity
    defaults: GenerationDefaults
    prompts: PromptBuilder
    tokenizer: Tokenizer
    #: --kv-memory, or what was found for it.
    kv_memory: int
    encoder_cache_memory: int = 0


async def run(config: PDConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains. ConfigError for what cannot work as configured."""
    check_bind(config.host, config.internal_token)
    check_stall_timeout(config.stall_timeout)
    if config.advertise:
        check_advertise(config.advertise)
    stop = stop_signal()
    store = await connect_configured(config.store)
    try:
        model = await asyncio.to_thread(in_short_lived_thread, load_model, config)
        await _serve(config, model, store, stop)
    finally:
        await store.close()


async def _serve(config: PDConfig, model: LoadedModel, store: EmbeddingStore, stop: asyncio.Event) -> None:
    auth = WorkerAuth(config.internal_token)
    server = make_server(auth)
    address = bind(server, config)
    metrics = PDMetrics(model.name)
    with metrics_server(config.host, config.metrics_port, metrics.registry) as metrics_port:
        pacer = _step_pacer(config, model)
        worker = PDWorker(config, model, metrics, pacer=pacer)
        info = auth.add_worker(worker.info(address, metrics_port))
        pd_pb2_grpc.add_PDServiceServicer_to_server(worker.servicer, server)  # type: ignore[no-untyped-call]
        health = Health(server)
        before_each_layer(model.decoder.module, worker.engine.beat.tick)
        if config.attention_backend == "flex":
            slow_while_compiling(worker.engine.beat)
        watch = WorkerWatch(health, [worker.engine.beat], config.stall_timeout)
        heartbeat = Heartbeat(Registry(store), info, healthy=watch.healthy)
        worker.start()
        async with watch:
            try:
                await server.start()
                await health.serving()
                heartbeat.start()
                logger.info("ready: pd %s %s", address, model.name)
                await stop.wait()
                logger.info("draining: %d requests", worker.outbox.unfinished)
                await heartbeat.stop()
                await health.leaving()
                await worker.drain(DRAIN_SECONDS)
            finally:
                worker.outbox.shut_down()
                await server.stop(1.0)
                await worker.stop()
                pacer.close()


class PDWorker:
    """Engine, connector, intake and outbox of one model, wired together in the running event loop.

    `transfer` says where embeddings are loaded from, the store by default; `pacer` is the engine's.
    """

    def __init__(
        self,
        config: PDConfig,
        model: LoadedModel,
        metrics: PDMetrics,
        *,
        transfer: ECTransferConfig | None = None,
        pacer: StepPacer | None = None,
    ) -> None:
        config = replace(
            config,
            kv_memory=config.kv_memory or model.kv_memory,
            encoder_cache_memory=config.encoder_cache_memory or model.encoder_cache_memory,
        )
        self._config = config
        self._model = model
        self._pool = ThreadPoolExecutor(_INTAKE_THREADS, thread_name_prefix="intake")
        self._queries = ThreadPoolExecutor(1, thread_name_prefix="query")
        self._upkeep: list[asyncio.Task[None]] = []
        texts = TokenTexts(model.tokenizer)
        self.outbox = Outbox(self._cancel, texts=texts)
        self.engine = Engine(
            config,
            model.decoder,
            transfer or transfer_config(config, model.identity),
            self.outbox.emit,
            metrics,
            model_name=model.name,
            pacer=pacer,
        )
        intake = Intake(
            model_key=model.identity.model_key,
            prompts=model.prompts,
            tokenizer=model.tokenizer,
            decoder=model.decoder,
            defaults=model.defaults,
            max_model_len=self.engine.max_model_len,
            encoder_cache_bytes=config.embedding_memory,
            grammars=GrammarCompiler(model.tokenizer, model.defaults.eos_token_ids),
            two_prompts=self._two_prompts(),
        )
        most = MAX_WAITING + config.max_num_seqs
        self._incarnation = uuid.uuid4().hex
        self.servicer = PDServicer(
            self.engine,
            intake,
            self.outbox,
            self._pool,
            self._queries,
            max_requests=most,
            incarnation=self._incarnation,
        )

    def _two_prompts(self) -> EncDecPrompts | None:
        """What makes prompts for an encoder-decoder model; None for any other."""
        model = self._model
        if model.decoder.cross is None:
            return None
        return EncDecPrompts(model.tokenizer, model.prompts.guarded, model.decoder, self.engine.max_model_len)

    def info(self, address: str, metrics_port: int) -> WorkerInfo:
        """The worker's registration. It serves all namespaces of its model_key."""
        return WorkerInfo(
            address=address,
            pool="pd",
            incarnation=self._incarnation,
            model_key=self._model.identity.model_key,
            model=self._model.name,
            capacity={
                "encoder_cache_bytes": self._config.embedding_memory,
                "max_num_seqs": self._config.max_num_seqs,
                "max_model_len": self.engine.max_model_len,
                "metrics_port": metrics_port,
                "encoder_decoder": int(self._model.decoder.cross is not None),
            },
            modality=self._model.decoder.modality,
        )

    def start(self) -> None:
        self.engine.start()
        loop = asyncio.get_running_loop()
        self._upkeep = [
            loop.create_task(self._sweep(), name="sweep"),
            loop.create_task(self._tell_beat(), name="beat"),
        ]

    async def drain(self, grace: float) -> None:
        """Refuses what is new and lets what is held finish, for at most `grace` seconds."""
        self.servicer.drain()
        deadline = time.monotonic() + grace
        while not self.outbox.idle and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)

    async def stop(self) -> None:
        """Ends the engine and gives everything back."""
        for task in self._upkeep:
            task.cancel()
        await asyncio.gather(*self._upkeep, return_exceptions=True)
        await asyncio.to_thread(self.engine.stop)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._queries.shutdown(wait=False, cancel_futures=True)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self.outbox.sweep()

    async def _tell_beat(self) -> None:
        beat = self.engine.beat
        while True:
            # A dead engine's count stands still.
            self.outbox.beat(beat.count, beat.patience)
            await asyncio.sleep(BEAT_SECONDS)

    def _cancel(self, request_ids: Sequence[str], proxy_id: str) -> None:
        # An engine that is stopping ends all its requests anyway.
        with contextlib.suppress(Unavailable):
            self.engine.cancel(request_ids, proxy_id)


def _step_pacer(config: PDConfig, model: LoadedModel) -> StepPacer:
    return step_pacer(
        config.core_page,
        config.core_slot,
        decoder_threads(config.threads, model.decoder.geometry.hidden_size),
        interval=config.step_interval,
        own_core=config.keep_core,
    )


def transfer_config(config: PDConfig, model: ModelIdentity) -> ECTransferConfig:
    """How this worker's connector reaches the store."""
    return ECTransferConfig(
        store_url=config.store,
        model_key=model.model_key,
        namespace=model.namespace,
        device=config.device,
        host_buffer_bytes=config.embedding_memory,
        ec_role="consumer",
    )


def load_model(config: PDConfig, *, other_peak: int = 0) -> LoadedModel:
    """The checkpoint of `config.model`; ConfigError for one that cannot be served as configured.

    `other_peak` is what another model in this process takes of the device while it computes.
    """
    start = time.monotonic()
    path = Path(config.model)
    check_supported(path, wanted_by_flags(config))
    device = resolve_device(config.device)
    dtype = resolve_dtype(path, device, config.dtype)
    decoder = load_decoder(
        path,
        device=device,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        quantization=config.quantization,
    )
    use_threads(decoder_threads(config.threads, decoder.geometry.hidden_size))
    if config.attention_backend == "flex":
        prepare(path, decoder, config.block_size)
    config = _sized(config, decoder, other_peak)
    num_kv_blocks(config, decoder.geometry, dtype)
    longest = max_model_len(config, decoder.geometry, dtype)
    if not config.max_model_len and longest < decoder.geometry.max_position_embeddings:
        logger.info(
            "requests have up to %d of the checkpoint's %d tokens: --max-model-len, --kv-memory",
            longest,
            decoder.geometry.max_position_embeddings,
        )
    prompts, tokenizer = open_checkpoint(path, decoder, longest)
    identity = model_identity(
        path, dtype=dtype, revision=config.model_revision, quantization=config.quantization
    )
    size = format_size(sum(p.numel() * p.element_size() for p in decoder.module.parameters()))
    logger.info("loaded %s of decoder weights in %.1f s", size, time.monotonic() - start)
    name = config.served_model_name or path.resolve().name
    return LoadedModel(
        path,
        name,
        decoder,
        identity,
        generation_defaults(path),
        prompts,
        tokenizer,
        config.kv_memory,
        config.encoder_cache_memory,
    )


def _sized(config: PDConfig, decoder: DecoderSide, other_peak: int) -> PDConfig:
    """With the memory that the device has for KV cache and embeddings; on a CPU a given one is enough."""
    if config.kv_memory and decoder.device.type == "cpu":
        return config
    plan = size_kv_memory(config, decoder, memory_of(decoder.device), other_peak=other_peak)
    logger.info("memory of %s:\n%s", decoder.device, plan.table())
    return replace(config, kv_memory=plan.kv_memory, encoder_cache_memory=plan.needs.embeddings)

"""The native engine of a PD worker: its decoder is loaded, its engine is built, its worker is made."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from triptych.base.config import PDConfig, format_size
from triptych.base.cpu.step_pacer import StepPacer
from triptych.base.cpu.threads import in_short_lived_thread
from triptych.base.machine.resources import worker_kind
from triptych.base.metrics import PDMetrics
from triptych.base.tracing.tracer import Tracer
from triptych.base.types import WorkerInfo
from triptych.ec_connector.base import DirectTransfer, ECConnectorRole, ECConnectorScheduler, ECTransferConfig
from triptych.ec_connector.factory import ECConnectorFactory
from triptych.models.base import DecoderSide
from triptych.models.checkpoint.quantized import check_decoder
from triptych.models.checkpoint.support import check_supported, required_by_flags
from triptych.models.identity import ModelIdentity
from triptych.models.weights.kernel_report import Capabilities, KernelUse, choice_of, kernels_in_use
from triptych.pd_worker.attention.attention import backend_on
from triptych.pd_worker.attention.early_pages import EarlyPages
from triptych.pd_worker.core.admission import Admission, SchedulerLimits
from triptych.pd_worker.core.encoder_cache import EncoderCache
from triptych.pd_worker.core.items.tracker import ItemTracker
from triptych.pd_worker.core.kv_cache.cross_kv_manager import CrossKVManager
from triptych.pd_worker.core.kv_cache.kv_cache_manager import KVCacheManager, SwapManager
from triptych.pd_worker.core.kv_cache.state_slots import StateSlots
from triptych.pd_worker.core.request_events import EngineEvent
from triptych.pd_worker.core.scheduler import Scheduler
from triptych.pd_worker.engine import Engine
from triptych.pd_worker.events.attempt_trace import PDTraces
from triptych.pd_worker.frontend.encdec_prompt import EncDecPrompts
from triptych.pd_worker.frontend.grammar import compiler_of
from triptych.pd_worker.frontend.tokenization import check_prompts
from triptych.pd_worker.kv_sharing.prefix_sharing import prefix_sharing
from triptych.pd_worker.ranks.decoder_ranks import DecoderRanks
from triptych.pd_worker.ranks.ranked_runner import OtherRanks, RankedRunner
from triptych.pd_worker.ranks.share import decoder_threads_of_rank, load_share, sized
from triptych.pd_worker.runner.capacity import (
    cross_limits_of,
    max_model_len,
    num_host_blocks,
    num_kv_blocks,
    runner_options,
    state_capacity,
    uses_graphs,
)
from triptych.pd_worker.runner.graph_start import capture_decode_graphs
from triptych.pd_worker.runner.model_runner import ModelRunner
from triptych.pd_worker.runner.step_metrics import StepMetrics
from triptych.pd_worker.worker import PDModel, PDWorker, load_report
from triptych.registry.matching import DIRECT

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel(PDModel):
    """A checkpoint's decoder side with its weights."""

    #: --kv-memory, or the size found by profiling.
    kv_memory: int
    encoder_cache_memory: int = 0
    state_memory: int = 0
    #: The other ranks, where `decoder` is rank 0's share; they have loaded theirs.
    ranks: DecoderRanks | None = None


def load_model(config: PDConfig, *, other_peak: int = 0) -> LoadedModel:
    """The checkpoint of `config.model`; ConfigError for one that cannot be served as configured.

    `config` is that of one rank, see `share_of_rank`; with several, the others are started and load, too.
    `other_peak` is what another model in this process takes of the device while it computes.
    """
    check_supported(Path(config.model), required_by_flags(config))
    check_decoder(Path(config.model), config.device)
    check_prompts(Path(config.model))
    if config.tensor_parallel == 1:
        return _load(config, None, other_peak)
    ranks = DecoderRanks(config)
    try:
        ranks.start()
        return _load(config, ranks, other_peak)
    except BaseException:
        ranks.close(seconds=0)
        raise


def _load(config: PDConfig, ranks: DecoderRanks | None, other_peak: int) -> LoadedModel:
    start = time.monotonic()
    decoder = load_share(config, 0)
    if ranks is None:
        config = sized(config, decoder, other_peak)
    else:
        ranks.join(decoder)
        kv_memory, embeddings = ranks.sized(config, decoder, other_peak)
        config = replace(config, kv_memory=kv_memory, encoder_cache_memory=embeddings)
    num_kv_blocks(config, decoder.geometry, decoder.dtype)
    longest = max_model_len(config, decoder.geometry, decoder.dtype)
    if not config.max_model_len and longest < decoder.geometry.max_position_embeddings:
        logger.info(
            "requests have up to %d of the checkpoint's %d tokens: --max-model-len, --kv-memory",
            longest,
            decoder.geometry.max_position_embeddings,
        )
    model = LoadedModel.open(
        config,
        decoder,
        longest,
        kv_memory=config.kv_memory,
        encoder_cache_memory=config.encoder_cache_memory,
        state_memory=config.state_memory,
        ranks=ranks,
    )
    if (states := state_capacity(config, decoder.geometry)) is not None:
        nbytes = decoder.geometry.slot_bytes
        logger.info(
            "states of %s: %d slots, %d snapshots (%s)",
            format_size(nbytes),
            states.slots,
            states.snapshots,
            format_size(states.snapshots * nbytes),
        )
    size = format_size(sum(p.numel() * p.element_size() for p in decoder.module.parameters()))
    logger.info("loaded %s of decoder weights in %.1f s", size, time.monotonic() - start)
    return model


class NativeWorker(PDWorker):
    """A PD worker that computes itself, in the running event loop.

    `transfer` says where embeddings are loaded from, the store by default; `pacer` is the engine's. The
    caller closes the `tracer`.
    """

    def __init__(
        self,
        config: PDConfig,
        model: LoadedModel,
        metrics: PDMetrics,
        *,
        transfer: ECTransferConfig | None = None,
        pacer: StepPacer | None = None,
        tracer: Tracer | None = None,
        incarnation: str = "",
    ) -> None:
        # Sizes that were measured at the start, where the flags leave them open.
        config = replace(
            config,
            kv_memory=config.kv_memory or model.kv_memory,
            encoder_cache_memory=config.encoder_cache_memory or model.encoder_cache_memory,
            state_memory=config.state_memory or model.state_memory,
        )
        super().__init__(config, model, incarnation)
        transfer = transfer or transfer_config(config, model.identity)
        if tracer is not None:
            transfer = transfer.traced()
        self.direct = transfer.direct if transfer.connector == "redis" else None
        self.engine = engine = build_engine(
            config,
            model.decoder,
            transfer,
            self.streams.emit,
            metrics,
            model_name=model.name,
            pacer=pacer,
            ranks=model.ranks,
        )
        self._offer_stored_requests()
        metrics.busy.set_function(engine.beat.busy.share)
        producers = None if tracer is None else transfer.producers
        self.connect(
            engine,
            compiler_of(config, model.tokenizer, model.defaults.eos_token_ids),
            engine.beat,
            functools.partial(load_report, metrics, config.embedding_memory),
            two_prompts=None
            if model.decoder.cross is None
            else EncDecPrompts(model.tokenizer, model.prompts.guarded, model.decoder, engine.max_model_len),
            traces=None if tracer is None or producers is None else PDTraces(tracer, producers),
        )

    def _offer_stored_requests(self) -> None:
        """Of a prefill worker: decode workers may have a request once they find its blocks."""
        sharing = self.engine.sharing
        if self.streams.offers_at_first_token and sharing is not None and sharing.saves is not None:
            self.streams.offers_at_first_token = False
            sharing.saves.on_stored = lambda request: self.streams.call_offer(
                request.proxy_id, request.request_id, request.attempt
            )

    def info(self, address: str, metrics_port: int) -> WorkerInfo:
        """The worker's registration."""
        config, decoder = self._config, self._model.decoder
        ranks, cross = config.tensor_parallel, decoder.cross is not None
        threads = ranks * decoder_threads_of_rank(config, decoder.geometry.hidden_size)
        kind = worker_kind(config.worker_kind, config.device, threads, ranks=ranks)
        capacity = {
            "encoder_decoder": int(cross),
            "pools": int(not cross),
            "keeps_items": int(config.prefix_caching or cross),
            DIRECT: int(self.direct is not None),
        }
        return self.registration(address, metrics_port, kind, capacity)

    def start(self) -> None:
        self.engine.start()
        super().start()

    async def _stop_engine(self) -> None:
        await asyncio.to_thread(self.engine.stop)


def transfer_config(config: PDConfig, model: ModelIdentity) -> ECTransferConfig:
    """The connector's configuration: a consumer of the store."""
    return ECTransferConfig(
        store_url=config.store,
        model_key=model.model_key,
        namespace=model.namespace,
        device=config.device,
        host_buffer_bytes=config.embedding_memory,
        ec_role="consumer",
        direct=DirectTransfer.of(config),
    )


def build_engine(
    config: PDConfig,
    decoder: DecoderSide,
    transfer: ECTransferConfig | None,
    emit: Callable[[list[EngineEvent]], None],
    metrics: PDMetrics,
    *,
    model_name: str = "",
    pacer: StepPacer | None = None,
    ranks: OtherRanks | None = None,
) -> Engine:
    """An engine whose thread is not started; ConfigError for what its memory cannot hold.

    `transfer` says where embeddings are loaded from; with None there is no connector, and only text is
    computed. `emit` and `pacer` are the engine's. With `ranks`, `decoder` is rank 0's share and `config` what
    each rank has; the engine ends them.
    """
    connector = None
    if transfer is None and ranks is not None:
        raise ValueError("an engine of several ranks has connectors: give it a transfer")
    if transfer is not None:
        connector = ECConnectorFactory.create_connector(transfer, ECConnectorRole.SCHEDULER)
    runner = _build_runner(config, decoder, ranks)
    metrics.ranks.set(config.tensor_parallel)
    metrics.parameter_bytes.set(runner.parameter_bytes)
    for use in _kernels(config, decoder):
        logger.info("kernel of %s", use)
        metrics.kernel.labels(model_name or config.served_model_name, use.part, use.kernel, use.why).set(1)
    engine = Engine(
        _build_scheduler(config, decoder, connector),
        runner,
        connector,
        emit,
        StepMetrics(metrics, model_name or config.served_model_name),
        decoder.device,
        pacer=pacer,
        pages=EarlyPages(runner.kv_cache.pools),
    )
    model_key = "" if transfer is None else transfer.model_key
    engine.sharing = prefix_sharing(config, decoder, model_key, engine.scheduler, runner, metrics)
    if transfer is not None:
        runner.ensure_ec_transfer_initialized(transfer, ECConnectorRole.WORKER, engine.wake)
        if ranks is not None:
            ranks.build(config, transfer, engine.wake)
    return engine


def _kernels(config: PDConfig, decoder: DecoderSide) -> tuple[KernelUse, ...]:
    return kernels_in_use(
        in_short_lived_thread(Capabilities.of_this),
        device=decoder.device.type,
        dtype=decoder.dtype,
        attention=backend_on(decoder.device, config.attention_backend),
        linear=config.linear_kernel,
        quantization=config.quantization,
        chosen=choice_of(decoder.module),
    )


def _build_scheduler(
    config: PDConfig, decoder: DecoderSide, connector: ECConnectorScheduler | None
) -> Scheduler:
    longest = max_model_len(config, decoder.geometry, decoder.dtype)
    num_blocks = num_kv_blocks(config, decoder.geometry, decoder.dtype)
    states = state_capacity(config, decoder.geometry)
    kv = KVCacheManager(
        num_blocks,
        config.block_size,
        prefix_caching=config.prefix_caching,
        states=None
        if states is None
        else StateSlots(states.slots, states.snapshots, keeps_end=config.saves_kv),
    )
    swap = SwapManager(
        num_host_blocks(config, decoder.geometry, decoder.dtype),
        None if states is None else states.host_slots,
    )
    cross = cross_limits = None
    if decoder.cross is not None:
        cross = CrossKVManager(kv.pool, config.block_size, swap)
        whole = decoder.modality == "audio"
        cross_limits = cross_limits_of(config, decoder.cross, num_blocks, longest, whole=whole)
    items = ItemTracker(
        EncoderCache(config.embedding_memory), Admission(config.embedding_memory), connector, cross
    )
    if config.max_num_seqs > config.step_tokens:
        logger.warning(
            "--max-num-batched-tokens %d is below --max-num-seqs %d: no more requests decode in one step",
            config.step_tokens, config.max_num_seqs,
        )  # fmt: skip
    limits = SchedulerLimits(config.max_num_seqs, config.step_tokens, longest)
    return Scheduler(limits, kv, items, cross_limits, swap, overlap_prefill=config.overlap_prefill)


def _build_runner(config: PDConfig, decoder: DecoderSide, ranks: OtherRanks | None) -> ModelRunner:
    options = runner_options(config, decoder)
    runner: ModelRunner
    if ranks is None:
        runner = in_short_lived_thread(ModelRunner, decoder, **options)
    else:
        runner = in_short_lived_thread(RankedRunner, decoder, ranks, **options)
    if uses_graphs(config, decoder.device, decoder.geometry):
        in_short_lived_thread(capture_decode_graphs, config, decoder, runner)
    return runner

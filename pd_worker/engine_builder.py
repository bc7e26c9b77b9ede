"""Builds the engine of a PD worker from its configuration and decoder."""

from __future__ import annotations

from collections.abc import Callable

from triptych.config import PDConfig
from triptych.cpu.step_pacer import StepPacer
from triptych.cpu.threads import in_short_lived_thread
from triptych.ec_connector.base import ECConnectorRole, ECConnectorScheduler, ECTransferConfig
from triptych.ec_connector.factory import ECConnectorFactory
from triptych.metrics import PDMetrics
from triptych.models.base import DecoderSide
from triptych.pd_worker.attention.run_attention import uses_runs
from triptych.pd_worker.core.admission import Admission
from triptych.pd_worker.core.encoder_cache import EncoderCache
from triptych.pd_worker.core.items.tracker import ItemTracker
from triptych.pd_worker.core.kv_cache.cross_kv_manager import CrossKVManager
from triptych.pd_worker.core.kv_cache.kv_cache_manager import KVCacheManager
from triptych.pd_worker.core.kv_cache.swap import SwapManager
from triptych.pd_worker.core.limits import SchedulerLimits
from triptych.pd_worker.core.request_events import EngineEvent
from triptych.pd_worker.core.scheduler import Scheduler
from triptych.pd_worker.engine import Engine
from triptych.pd_worker.ranks.ranked_runner import OtherRanks, RankedRunner
from triptych.pd_worker.runner.capacity import (
    cross_limits_of,
    max_model_len,
    num_host_blocks,
    num_kv_blocks,
    runner_options,
    uses_graphs,
)
from triptych.pd_worker.runner.graph_start import capture_decode_graphs
from triptych.pd_worker.runner.model_runner import ModelRunner
from triptych.pd_worker.step_metrics import StepMetrics

#: Part of the KV blocks that may be evicted before it is needed, so that a request's blocks are long runs.
#: With half of it there are twice as many runs once the cache is full.
_EVICTED_EARLY = 0.125


def build_engine(
    config: PDConfig,
    decoder: DecoderSide,
    transfer: ECTransferConfig,
    emit: Callable[[list[EngineEvent]], None],
    metrics: PDMetrics,
    *,
    model_name: str = "",
    pacer: StepPacer | None = None,
    ranks: OtherRanks | None = None,
) -> Engine:
    """An engine whose thread is not started; ConfigError for what its memory cannot hold.

    `transfer` says where embeddings are loaded from; `emit` and `pacer` are the engine's. With `ranks`,
    `decoder` is rank 0's share and `config` what each rank has; the engine ends them.
    """
    connector = ECConnectorFactory.create_connector(transfer, ECConnectorRole.SCHEDULER)
    runner = _build_runner(config, decoder, ranks)
    metrics.ranks.set(config.tensor_parallel)
    metrics.parameter_bytes.set(runner.parameter_bytes)
    engine = Engine(
        _build_scheduler(config, decoder, connector),
        runner,
        connector,
        emit,
        StepMetrics(metrics, model_name or config.served_model_name),
        decoder.device,
        pacer=pacer,
    )
    runner.ensure_ec_transfer_initialized(transfer, ECConnectorRole.WORKER, engine.wake)
    if ranks is not None:
        ranks.build(config, transfer, engine.wake)
    return engine


def _build_scheduler(config: PDConfig, decoder: DecoderSide, connector: ECConnectorScheduler) -> Scheduler:
    longest = max_model_len(config, decoder.geometry, decoder.dtype)
    num_blocks = num_kv_blocks(config, decoder.geometry, decoder.dtype)
    kv = KVCacheManager(
        num_blocks,
        config.block_size,
        prefix_caching=config.prefix_caching,
        evict_early=_EVICTED_EARLY if uses_runs(config.attention_backend, decoder) else 0.0,
    )
    swap = SwapManager(num_host_blocks(config, decoder.geometry, decoder.dtype))
    cross = cross_limits = None
    if decoder.cross is not None:
        cross = CrossKVManager(kv.pool, config.block_size, swap)
        whole = decoder.modality == "audio"
        cross_limits = cross_limits_of(config, decoder.cross, num_blocks, longest, whole=whole)
    items = ItemTracker(
        EncoderCache(config.embedding_memory), Admission(config.embedding_memory), connector, cross
    )
    limits = SchedulerLimits(config.max_num_seqs, config.max_num_batched_tokens, longest)
    return Scheduler(limits, kv, items, cross_limits, swap, overlap_prefill=config.overlap_prefill)


def _build_runner(config: PDConfig, decoder: DecoderSide, ranks: OtherRanks | None) -> ModelRunner:
    options = runner_options(config, decoder)
    runner: ModelRunner
    if ranks is None:
        runner = in_short_lived_thread(ModelRunner, decoder, **options)
    else:
        runner = in_short_lived_thread(RankedRunner, decoder, ranks, **options)
    if uses_graphs(config, decoder.device):
        in_short_lived_thread(capture_decode_graphs, config, decoder, runner)
    return runner

"""The process of a PD worker: load, serve, register, and drain on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import uuid

from triptych.config import PDConfig
from triptych.cpu.step_pacer import StepPacer, step_pacer
from triptych.cpu.threads import in_short_lived_thread
from triptych.ec_connector.store.embedding_store import EmbeddingStore, connect_configured
from triptych.metrics import PDMetrics
from triptych.models.layers import before_each_layer
from triptych.pd_worker.model_loading import LoadedModel, load_model
from triptych.pd_worker.process import PDProcess
from triptych.pd_worker.ranks.share import decoder_threads_of_rank, share_of_rank
from triptych.pd_worker.vllm.service import serve_vllm
from triptych.pd_worker.worker import PDWorker
from triptych.status.service_status import ServiceStatus
from triptych.status.status_server import StatusServer, status_server
from triptych.tracing.start import start_tracer
from triptych.worker_process import ProcessWatch, check_worker, stop_signal

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
    metrics = PDMetrics(model.name)
    process = PDProcess(config, metrics, store, page)
    pacer = _step_pacer(config, model)
    incarnation = uuid.uuid4().hex
    tracer = start_tracer(config, "pd", incarnation)
    worker = PDWorker(config, model, metrics, pacer=pacer, tracer=tracer, incarnation=incarnation)
    before_each_layer(model.decoder.module, worker.engine.beat.tick)
    before_each_layer(model.decoder.module, pacer.choose_threads)
    others = [] if model.ranks is None else model.ranks.beats
    watch = ProcessWatch(process.health, [worker.engine.beat, *others], config.stall_timeout)
    try:
        await process.serve(worker, watch, stop, healthy=watch.healthy)
    finally:
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

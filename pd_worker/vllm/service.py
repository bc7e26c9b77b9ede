"""The process of a PD worker with --engine vllm: wait for vLLM, serve, register, and drain on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import uuid

from triptych.config import PDConfig
from triptych.cpu.threads import in_short_lived_thread
from triptych.ec_connector.store.embedding_store import EmbeddingStore, connect_configured
from triptych.metrics import PDMetrics
from triptych.pd_worker.process import PDProcess
from triptych.pd_worker.vllm.connection import EngineConnection, connected
from triptych.pd_worker.vllm.front_model import load_front_model
from triptych.pd_worker.vllm.settings import check_engine
from triptych.pd_worker.vllm.worker import VLLMWorker
from triptych.status.service_status import ServiceStatus
from triptych.status.status_server import StatusServer, status_server
from triptych.tracing.start import start_tracer
from triptych.worker_process import ProcessWatch, stop_signal

logger = logging.getLogger(__name__)


async def serve_vllm(config: PDConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains. ConfigError for what cannot work as configured."""
    check_engine(config)
    stop = stop_signal()
    with status_server(config.host, config.metrics_port, ServiceStatus()) as page:
        store = await connect_configured(config.store)
        try:
            async with connected(config, stop) as engine:
                if engine is not None:
                    await _serve(config, engine, store, stop, page)
        finally:
            await store.close()


async def _serve(
    config: PDConfig, engine: EngineConnection, store: EmbeddingStore, stop: asyncio.Event, page: StatusServer
) -> None:
    info = engine.info
    logger.info("vLLM %s serves %s, %d tokens", info.version, info.root, info.max_model_len)
    model = await asyncio.to_thread(in_short_lived_thread, load_front_model, config, info.max_model_len)
    metrics = PDMetrics(model.name)
    process = PDProcess(config, metrics, store, page)
    incarnation = uuid.uuid4().hex
    tracer = start_tracer(config, "pd", incarnation)
    worker = VLLMWorker(config, model, engine, store, metrics, tracer=tracer, incarnation=incarnation)
    health = engine.health
    watch = ProcessWatch(process.health, [], config.stall_timeout, serves=lambda: health.up)
    try:
        # Not `watch.healthy`: a restart of this process does not help a server that is away.
        await process.serve(
            worker, watch, stop, healthy=watch.alive, degraded=lambda: () if health.up else ("vLLM",)
        )
    finally:
        if tracer is not None:
            await asyncio.to_thread(tracer.close)

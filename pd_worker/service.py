"""The process of a PD worker, native or before vLLM: load, serve, register, and drain on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import secrets
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from triptych.base.config import PDConfig
from triptych.base.cpu.step_pacer import StepPacer, step_pacer
from triptych.base.cpu.threads import in_short_lived_thread, many_rows
from triptych.base.machine.resources import threads_of_one_worker
from triptych.base.metrics import PDMetrics
from triptych.base.tracing.start import worker_tracer
from triptych.base.types import WorkerInfo
from triptych.base.vllm_classes import class_of
from triptych.base.worker_process import ProcessWatch
from triptych.models.checkpoint.pooling import read_task
from triptych.models.defaults import start_lock
from triptych.models.registry import before_each_layer, family_of
from triptych.pd_worker.native import LoadedModel, NativeWorker, load_model
from triptych.pd_worker.ranks.share import decoder_threads_of_rank, share_of_rank
from triptych.pd_worker.vllm.adapters import check_server, read_adapters
from triptych.pd_worker.vllm.class_trial import try_class
from triptych.pd_worker.vllm.connection import (
    check_engine,
    check_native,
    check_own,
    choose_engine,
    connected,
    vllm_program,
)
from triptych.pd_worker.vllm.own_server import own_server, with_dtype
from triptych.pd_worker.vllm.pooled import probe_of
from triptych.pd_worker.vllm.worker import VLLMWorker, load_front_model, proven_tickets
from triptych.pd_worker.worker import PDWorker
from triptych.protos import pd_pb2_grpc
from triptych.registry.registry import StoreReach
from triptych.registry.worker_server import WorkerProcess, WorkerServer, worker_process

logger = logging.getLogger(__name__)


async def run(config: PDConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains. ConfigError for what cannot work as configured."""
    architecture = family_of(Path(config.model)).architecture
    program = "" if config.engine == "native" else vllm_program()
    choice = choose_engine(config, architecture, program, read_task(Path(config.model)))
    logger.info("engine: %s (%s)", choice.engine, choice.reason)
    serve: Callable[[PDConfig, WorkerProcess], Awaitable[None]] = _serve_vllm
    if choice.engine == "native":
        check_native(config)
        serve = _serve_native
    elif choice.own:
        check_own(config)
        class_of(architecture, generic=config.engine_class == "generic")
        config, serve = with_dtype(config), partial(_serve_own, program)
    else:
        check_engine(config)
    async with worker_process(config) as process:
        await serve(config, process)


async def _serve_native(config: PDConfig, process: WorkerProcess) -> None:
    config = share_of_rank(config)
    starting = await asyncio.to_thread(start_lock, config)
    model = await asyncio.to_thread(in_short_lived_thread, load_model, config)
    metrics, incarnation = PDMetrics(model.name), uuid.uuid4().hex
    server = WorkerServer(config, "pd", process)
    server.publish(metrics.registry)
    pacer = _step_pacer(config, model)
    async with worker_tracer(config, "pd", incarnation) as tracer:
        worker = NativeWorker(config, model, metrics, pacer=pacer, tracer=tracer, incarnation=incarnation)
        starting.release()
        beat = worker.engine.beat
        before_each_layer(model.decoder.module, beat.tick)
        before_each_layer(model.decoder.module, pacer.choose_threads)
        beats = [beat, *(() if model.ranks is None else model.ranks.beats)]
        watch = ProcessWatch(server.health, beats, config.stall_timeout)
        try:
            await _serve(worker, server, watch, process)
        finally:
            pacer.close()


async def _serve_own(program: str, config: PDConfig, process: WorkerProcess) -> None:
    # Where the cluster has no token, what this worker says to its own vLLM is signed with one of theirs.
    token = config.internal_token or secrets.token_hex(32)
    async with own_server(config, program, process.stop, token) as served:
        await _serve_vllm(served, process, token)


async def _serve_vllm(config: PDConfig, process: WorkerProcess, token: str = "") -> None:
    task = read_task(Path(config.model))
    async with connected(config, process.stop, probe_of(task)) as engine:
        if engine is None:
            return
        info, health = engine.info, engine.health
        adapters = await asyncio.to_thread(read_adapters, config)
        check_server(adapters, info.adapters, config.device)
        drafts = ", speculatively" if info.speculates else ""
        logger.info("vLLM %s serves %s, %d tokens%s", info.version, info.root, info.max_model_len, drafts)
        model = await asyncio.to_thread(in_short_lived_thread, load_front_model, config, info.max_model_len)
        known = class_of(family_of(model.path).architecture, generic=True)
        if known.not_run:
            await try_class(engine, model, known)
        tickets = await proven_tickets(config, engine, token or config.internal_token)
        metrics, incarnation = PDMetrics(model.name), uuid.uuid4().hex
        server = WorkerServer(config, "pd", process)
        server.publish(metrics.registry)
        process.page.engine_metrics = engine.metrics_reader()
        async with worker_tracer(config, "pd", incarnation) as tracer:
            worker = VLLMWorker(
                config,
                model,
                engine,
                process.store,
                metrics,
                tracer=tracer,
                incarnation=incarnation,
                tickets=tickets,
                adapters=adapters,
            )
            watch = ProcessWatch(server.health, [], config.stall_timeout, serves=lambda: health.up)
            await _serve(
                worker,
                server,
                watch,
                process,
                lambda: () if health.up else ("vLLM",),
                renewed=worker.renewed,
            )


async def _serve(
    worker: PDWorker,
    server: WorkerServer,
    watch: ProcessWatch,
    process: WorkerProcess,
    degraded: Callable[[], Sequence[str]] = tuple,
    renewed: Callable[[WorkerInfo], WorkerInfo] = lambda info: info,
) -> None:
    info = worker.info(server.address, server.metrics_port)
    pd_pb2_grpc.add_PDServiceServicer_to_server(worker.servicer, server.grpc)
    reach = StoreReach(process.store.ping, server.health.reaches_store, worker.fail_unloaded)
    worker.follow(reach)
    await server.serve(worker, [info], watch, reach, degraded=degraded, renewed=renewed)


def _step_pacer(config: PDConfig, model: LoadedModel) -> StepPacer:
    width = model.decoder.geometry.hidden_size
    maximum = config.tensor_parallel * decoder_threads_of_rank(config, width)
    # Ranks are processes with threads of their own.
    alone = config.tensor_parallel == 1
    fewest = max(1, maximum // 2) if config.spare_cores and alone else maximum
    many = many_rows(config.threads, width) if alone else 0
    if many:
        most = threads_of_one_worker()
        logger.info("steps of less than %d rows take one thread, others up to %d", many, most)
    return step_pacer(
        config.core_page,
        config.core_slot,
        fewest,
        maximum=threads_of_one_worker() if many else maximum,
        interval=config.step_interval,
        own_core=config.keep_core,
        many=many,
        follows=alone and config.device == "cpu",
    )

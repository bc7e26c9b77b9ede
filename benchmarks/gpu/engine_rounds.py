"""Rounds of requests through an engine whose steps are driven and timed here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from triptych.base.config import PDConfig
from triptych.base.metrics import PDMetrics
from triptych.ec_connector.base import ECTransferConfig
from triptych.ec_connector.connectors.memory import MemoryStore
from triptych.models.base import DecoderSide
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.core.sampling import ResolvedSampling
from triptych.pd_worker.engine import Engine
from triptych.pd_worker.native import build_engine
from triptych_bench.simulator.cluster.pd import CountedOutput
from triptych_bench.simulator.profile.pd import engine_request


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def timings(run: Callable[[], object], device: str, repeats: int, warm_up: int = 1) -> list[float]:
    """Seconds of each repeat, after runs that do not count."""
    times = []
    for _ in range(warm_up + repeats):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return times[warm_up:]


def median_seconds(run: Callable[[], object], device: str, repeats: int) -> float:
    return statistics.median(timings(run, device, repeats))


def make_engine(path: Path, decoder: DecoderSide, store: MemoryStore | None = None, **flags: Any) -> Engine:
    """An engine whose steps the caller drives: its thread is not started. `decoder`: of this path."""
    transfers = ECTransferConfig(connector="memory", store=MemoryStore() if store is None else store)
    config = PDConfig(model=str(path), device=str(decoder.device), prefix_caching=False, **flags)
    return build_engine(config, decoder, transfers, lambda events: None, PDMetrics("bench"))


def make_requests(
    engine: Engine, prompts: list[list[int]], tokens: int, position_rows: int
) -> list[EngineRequest]:
    sampling = ResolvedSampling(tokens, 0, 0.0, 1.0, 0, 0, (), frozenset(), True, ())
    return [
        engine_request(
            i, prompt, torch.arange(len(prompt)).expand(position_rows, -1), sampling, CountedOutput(tokens, 0)
        )
        for i, prompt in enumerate(prompts)
    ]


def start_all(engine: Engine, requests: Sequence[EngineRequest]) -> None:
    """Steps until each of the requests has its first token."""
    for request in requests:
        engine.scheduler.check(request)
        engine.scheduler.add(request, 0.0)
    while not all(request.output_token_ids for request in requests):
        engine_step(engine)


def tokens_per_second(engine: Engine, requests: Sequence[EngineRequest], device: str) -> float:
    """Prefills all, then times the steps in which all decode: up to the first that ends a request.

    Where the prefills take several steps, the first request decodes during the others' and ends before them:
    each needs more tokens than there are such steps.
    """
    scheduler = engine.scheduler
    start_all(engine, requests)
    synchronize(device)
    before, began = _generated(requests), time.perf_counter()
    while scheduler.num_running == len(requests):
        engine_step(engine)
    synchronize(device)
    speed = (_generated(requests) - before) / (time.perf_counter() - began)
    while scheduler.num_running or scheduler.num_waiting:
        engine_step(engine)
    return speed


def _generated(requests: Sequence[EngineRequest]) -> int:
    return sum(len(request.output_token_ids) for request in requests)


def engine_step(engine: Engine) -> None:
    """Schedules, computes, and takes the tokens."""
    output = engine.scheduler.schedule(0.0)
    engine.scheduler.update(output, engine.runner.execute(output), 0.0)

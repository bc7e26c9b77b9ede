"""Rounds of requests through an engine whose steps are driven and timed here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from triptych.base.config import PDConfig
from triptych.base.metrics import PDMetrics
from triptych.ec_connector.base import ECTransferConfig
from triptych.ec_connector.connectors.memory import MemoryStore
from triptych.models.base import DecoderSide
from triptych.models.registry import load_decoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.core.sampling import ResolvedSampling
from triptych.pd_worker.engine import Engine
from triptych.pd_worker.native import build_engine
from triptych.simulator.cluster.pd import CountedOutput
from triptych.simulator.profile.pd import engine_request


@dataclass(frozen=True)
class DecodeSpeed:
    """Decode steps of one round."""

    tokens_per_second: float
    tokens_per_cpu_second: float


def make_engine(
    path: Path,
    device: str,
    dtype: torch.dtype,
    decoder: DecoderSide | None = None,
    store: MemoryStore | None = None,
    **flags: Any,
) -> Engine:
    """An engine whose steps the caller drives: its thread is not started. `decoder`: of this path."""
    decoder = decoder or load_decoder(
        path, device=torch.device(device), dtype=dtype, attn_implementation=ATTENTION_NAME
    )
    transfers = ECTransferConfig(connector="memory", store=MemoryStore() if store is None else store)
    config = PDConfig(model=str(path), device=device, prefix_caching=False, **flags)
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


class StepTimer:
    """Wall and CPU seconds since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def speed(self, tokens: int) -> DecodeSpeed:
        return DecodeSpeed(
            tokens / (time.perf_counter() - self._wall), tokens / max(1e-9, time.process_time() - self._cpu)
        )


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def engine_round(engine: Engine, requests: list[EngineRequest], device: str = "cpu") -> DecodeSpeed:
    """Prefills all, then times the steps in which all decode: up to the first that ends a request.

    Where the prefills take several steps, the first request decodes during the others' and ends before them:
    each needs more tokens than there are such steps.
    """
    scheduler, now = engine.scheduler, 0.0
    for request in requests:
        scheduler.check(request)
        scheduler.add(request, now)
    while not all(request.output_token_ids for request in requests):
        engine_step(engine)
    synchronize(device)
    before = _generated(requests)
    clock = StepTimer()
    while scheduler.num_running == len(requests):
        engine_step(engine)
    synchronize(device)
    speed = clock.speed(_generated(requests) - before)
    while scheduler.num_running or scheduler.num_waiting:
        engine_step(engine)
    return speed


def _generated(requests: Sequence[EngineRequest]) -> int:
    return sum(len(request.output_token_ids) for request in requests)


def engine_step(engine: Engine) -> None:
    """Schedules, computes, and takes the tokens."""
    output = engine.scheduler.schedule(0.0)
    engine.scheduler.update(output, engine.runner.execute(output), 0.0)

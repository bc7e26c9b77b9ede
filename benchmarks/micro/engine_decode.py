"""Decode speed of the engine against transformers' `generate`, in one interleaved run.

    python -m benchmarks engine_decode MODEL [--tokens 64] [--prompt 96] [--rounds 3] [--threads 1] [--write]

Both decode the same text prompts greedily at batch 1, 4 and 16 in fp32. Tokens per second count decode
steps only: the time between the first and the last step of a round, per side, and its CPU time, since
other processes may share the cores. Needs the `worker` extra and `triptych` installed or on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForImageTextToText

from benchmarks.result_page import RESULTS, add_write_flag, publish
from triptych.base.config import MIB, PDConfig
from triptych.base.metrics import PDMetrics
from triptych.ec_connector.base import ECTransferConfig
from triptych.ec_connector.connectors.memory_store import MemoryStore
from triptych.goodput.report.machine import chip
from triptych.models.base import DecoderSide
from triptych.models.registry import load_decoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.core.sampling import ResolvedSampling
from triptych.pd_worker.engine import Engine
from triptych.pd_worker.native import build_engine
from triptych.simulator.cluster.pd import CountedOutput
from triptych.simulator.profile.pd import engine_request

RESULT = RESULTS / "engine_decode.md"
BATCHES = (1, 4, 16)


@dataclass(frozen=True)
class DecodeSpeed:
    """One side's decode in one round."""

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


class FirstToken:
    """A stopping criterion that never stops: starts the clock when the first token is there."""

    clock: StepTimer | None = None

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if self.clock is None:
            self.clock = StepTimer()
        return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)


def generate_round(model: Any, prompts: list[list[int]], tokens: int) -> tuple[DecodeSpeed, list[list[int]]]:
    ids = torch.tensor(prompts)
    first = FirstToken()
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=[first],
    )
    assert first.clock is not None
    speed = first.clock.speed(len(prompts) * (tokens - 1))
    return speed, out[:, ids.shape[1] :].tolist()


def measure(
    path: Path, prompt_len: int, tokens: int, rounds: int
) -> dict[int, tuple[DecodeSpeed, DecodeSpeed, int]]:
    """(engine, generate, equal outputs in the last round) by batch; medians over interleaved rounds."""
    engine = make_engine(
        path, "cpu", torch.float32, max_model_len=prompt_len + tokens + 1, kv_memory=256 * MIB,
        max_num_batched_tokens=4096,
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    rows = engine.runner.position_rows
    rng = random.Random(0)
    vocabulary = model.config.text_config.vocab_size // 2
    results: dict[int, tuple[DecodeSpeed, DecodeSpeed, int]] = {}
    for batch in BATCHES:
        prompts = [[rng.randrange(vocabulary) for _ in range(prompt_len)] for _ in range(batch)]
        pairs = []
        equal = 0
        for _ in range(rounds + 1):
            requests = make_requests(engine, prompts, tokens, rows)
            ours = engine_round(engine, requests)
            theirs, outputs = generate_round(model, prompts, tokens)
            pairs.append((ours, theirs))
            equal = sum(r.output_token_ids == o for r, o in zip(requests, outputs, strict=True))
        ours, theirs = (_median([pair[side] for pair in pairs[1:]]) for side in (0, 1))
        results[batch] = (ours, theirs, equal)
    return results


def _median(speeds: list[DecodeSpeed]) -> DecodeSpeed:
    return DecodeSpeed(
        statistics.median(speed.tokens_per_second for speed in speeds),
        statistics.median(speed.tokens_per_cpu_second for speed in speeds),
    )


def report(results: dict[int, tuple[DecodeSpeed, DecodeSpeed, int]], arguments: argparse.Namespace) -> str:
    command = (
        f"python -m benchmarks engine_decode {arguments.title} --tokens {arguments.tokens} "
        f"--prompt {arguments.prompt} --rounds {arguments.rounds} --threads {arguments.threads}"
    )
    lines = [
        "# Engine decode against `generate`",
        "",
        f"`{command}`, {datetime.now(UTC):%Y-%m-%d}, {chip()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, fp32, medians of interleaved rounds. "
        f"Load averages at the end: {' '.join(f'{load:.1f}' for load in os.getloadavg())}; "
        "per CPU second is the steadier figure where other processes share the cores.",
        "",
        "| batch | engine tok/s | generate tok/s | ratio | engine tok/CPU-s | generate tok/CPU-s | ratio "
        "| equal outputs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for batch, (ours, theirs, equal) in results.items():
        lines.append(
            f"| {batch} | {ours.tokens_per_second:.0f} | {theirs.tokens_per_second:.0f} "
            f"| {ours.tokens_per_second / theirs.tokens_per_second:.2f} "
            f"| {ours.tokens_per_cpu_second:.0f} | {theirs.tokens_per_cpu_second:.0f} "
            f"| {ours.tokens_per_cpu_second / theirs.tokens_per_cpu_second:.2f} | {equal} of {batch} |"
        )
    return "\n".join([*lines, ""])


def engine_parser(description: str | None, page: Path) -> argparse.ArgumentParser:
    """Options of the benchmarks of an engine over a checkpoint, `main()` of which writes `page`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--title", default="MODEL", help="how the result names the checkpoint")
    parser.add_argument("--threads", type=int, default=1)
    add_write_flag(parser, page)
    return parser


def main() -> None:
    parser = engine_parser(__doc__, RESULT)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    text = report(measure(arguments.model, arguments.prompt, arguments.tokens, arguments.rounds), arguments)
    publish(text, RESULT, write=arguments.write)


if __name__ == "__main__":
    main()

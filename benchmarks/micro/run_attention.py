"""Decode steps and prefill chunks over runs of blocks, against gathered blocks, in one interleaved run.

    python -m benchmarks run_attention MODEL [--threads 1] [--rounds 5] [--tokens 16] [--dtype bfloat16]

Two engines over the same weights: one attends run by run, the other gathers the blocks of every layer and
masks. The time is of steps in which all sequences decode, and of chunks of 512 tokens by what is before them.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.micro.engine_decode import (
    engine_parser,
    engine_round,
    engine_step,
    make_engine,
    make_requests,
    prefill_steps,
)
from benchmarks.result_page import RESULTS, publish
from triptych.config import GIB
from triptych.goodput.report.machine import chip
from triptych.models.base import DecoderSide
from triptych.models.registry import load_decoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.engine import Engine

RESULT = RESULTS / "run_attention.md"
#: Sequences, and tokens of each prompt.
SHAPES = ((1, 100), (16, 100), (1, 480), (16, 480), (4, 2048))
CHUNK, CONTEXTS = 512, (0, 512, 1024, 1536)
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_Times = tuple[float, float, bool]


def make_pair(path: Path, dtype: torch.dtype, tokens: int) -> tuple[Engine, Engine]:
    """In runs, and gathered."""
    decoder = load_decoder(path, device=torch.device("cpu"), dtype=dtype, attn_implementation=ATTENTION_NAME)
    in_runs, gathering = (make_one(path, dtype, decoder, tokens) for _ in range(2))
    gathering.runner.attend_in_runs(False)
    return in_runs, gathering


def make_one(path: Path, dtype: torch.dtype, decoder: DecoderSide, tokens: int) -> Engine:
    longest = max(length + prefill_steps(count, length, CHUNK) for count, length in SHAPES) + tokens + 1
    flags = {"max_model_len": longest, "kv_memory": GIB, "max_num_batched_tokens": CHUNK}
    return make_engine(path, "cpu", dtype, decoder, **flags)


def step_times(engines: tuple[Engine, Engine], count: int, length: int, tokens: int, rounds: int) -> _Times:
    """Medians of seconds of a step, of either engine, and whether all tokens were equal."""
    seeded = random.Random(0)
    highest = engines[0].runner.vocab_size // 2
    prompts = [[seeded.randrange(highest) for _ in range(length)] for _ in range(count)]
    seconds: tuple[list[float], list[float]] = ([], [])
    outputs = []
    # The first round is not counted.
    for turn in range(rounds + 1):
        for side in first_and_second(turn):
            engine = engines[side]
            generated = tokens + prefill_steps(count, length, CHUNK)
            requests = make_requests(engine, prompts, generated, engine.runner.position_rows)
            seconds[side].append(count / engine_round(engine, requests).tokens_per_second)
            outputs.append([request.output_token_ids for request in requests])
    medians = [statistics.median(found[1:]) for found in seconds]
    return medians[0], medians[1], all(output == outputs[0] for output in outputs)


def chunk_times(engines: tuple[Engine, Engine], rounds: int) -> list[tuple[float, float]]:
    """Medians of seconds of a chunk by what is before it, of either engine."""
    seconds: tuple[list[list[float]], list[list[float]]] = ([], [])
    seeded = random.Random(0)
    for turn in range(rounds + 1):
        for side in first_and_second(turn):
            engine = engines[side]
            highest = engine.runner.vocab_size // 2
            prompt = [seeded.randrange(highest) for _ in range(CONTEXTS[-1] + CHUNK)]
            (request,) = make_requests(engine, [prompt], 1, engine.runner.position_rows)
            engine.scheduler.check(request)
            engine.scheduler.add(request, 0.0)
            seconds[side].append([_timed_step(engine) for _ in CONTEXTS])
    of_runs, gathered = ([statistics.median(times) for times in zip(*s[1:], strict=True)] for s in seconds)
    return list(zip(of_runs, gathered, strict=True))


def _timed_step(engine: Engine) -> float:
    begin = time.perf_counter()
    engine_step(engine)
    return time.perf_counter() - begin


def first_and_second(turn: int) -> tuple[int, int]:
    """Which of two sides begins a round: each in turn, since the second one finds the other's caches."""
    return (1, 0) if turn % 2 else (0, 1)


def read_bandwidth() -> float:
    """Bytes per second at which these threads sum 256 MiB, the best of five."""
    data, best = torch.ones(1 << 26), float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - begin)
    return data.nbytes / best


def read_bytes(engine: Engine, count: int, length: int) -> int:
    """Bytes that a decode step reads: the weights once, and the keys and values of all sequences."""
    return engine.runner.parameter_bytes + count * length * engine.runner.kv_cache.token_bytes


def decode_rows(engines: tuple[Engine, Engine], bandwidth: float, arguments: argparse.Namespace) -> list[str]:
    lines = []
    for count, length in SHAPES:
        runs, gathered, equal = step_times(engines, count, length, arguments.tokens, arguments.rounds)
        read = read_bytes(engines[0], count, length + arguments.tokens // 2) / runs
        lines.append(
            f"| {count} | {length} | {runs * 1e3:.1f} | {gathered * 1e3:.1f} | {runs / gathered:.2f} "
            f"| {read / 1e9:.1f} GB/s, {read / bandwidth:.0%} | {'yes' if equal else 'NO'} |"
        )
    return lines


def report(engines: tuple[Engine, Engine], arguments: argparse.Namespace) -> str:
    bandwidth = read_bandwidth()
    decodes = decode_rows(engines, bandwidth, arguments)
    chunks = chunk_times(engines, arguments.rounds)
    lines = [
        f"# Attention run by run, {arguments.threads} thread{'s' if arguments.threads > 1 else ''}",
        "",
        f"`python -m benchmarks run_attention {arguments.title} --threads {arguments.threads} --rounds "
        f"{arguments.rounds} --tokens {arguments.tokens} --dtype {arguments.dtype}`, "
        f"{datetime.now(UTC):%Y-%m-%d}, {chip()}, torch {torch.__version__}, medians of interleaved rounds. "
        f"Load average at the end: {os.getloadavg()[0]:.1f}. Reading alone: {bandwidth / 1e9:.1f} GB/s.",
        "",
        "| sequences | tokens of each | ms a step in runs | gathered | ratio | read in runs | tokens equal |",
        "|---:|---:|---:|---:|---:|---|---|",
        *decodes,
        "",
        f"| {CHUNK} tokens at | ms in runs | gathered | ratio | in runs, to those at 0 | gathered |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for context, (runs, gathered) in zip(CONTEXTS, chunks, strict=True):
        lines.append(
            f"| {context} | {runs * 1e3:.0f} | {gathered * 1e3:.0f} | {runs / gathered:.2f} "
            f"| {runs / chunks[0][0]:.2f} | {gathered / chunks[0][1]:.2f} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = engine_parser(__doc__, RESULT)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    engines = make_pair(arguments.model, _DTYPES[arguments.dtype], arguments.tokens)
    publish(report(engines, arguments), RESULT, write=arguments.write)


if __name__ == "__main__":
    main()

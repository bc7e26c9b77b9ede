"""Encode, prefill and decode of one checkpoint in absolute time, with the chip and the versions.

    python -m benchmarks.gpu.engine MODEL [--device cuda] [--dtype bfloat16] [--side 640]
        [--attention-backend blockwise] [--peak-tflops 989 --bandwidth-gbs 4800] [--chunk 512] [--write]
    python -m benchmarks.gpu.engine MODEL --device cpu --dtype float32 --side 64 --prompt 64 --tokens 8

Encode: seconds of the tower over 1 and 8 pictures of `side` pixels. Prefill: seconds of each step of
one prompt, `chunk` tokens each. Decode: tokens per second and milliseconds per step by batch. Each with its
share of the device's limit, of bandwidth or arithmetic, as `roofline.py` counts it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.gpu.device_limits import (
    DecoderSize,
    DeviceLimits,
    command_of,
    decoder_size,
    gpu_parser,
    limits_of,
    page,
    table,
    tower_work,
)
from benchmarks.micro.engine_decode import (
    engine_round,
    engine_step,
    make_engine,
    make_requests,
    synchronize,
)
from benchmarks.result_page import RESULTS, publish
from triptych.base.config import GIB, MIB
from triptych.models.registry import load_decoder, load_encoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.attention.backends import BACKENDS
from triptych.pd_worker.engine import Engine

RESULT = RESULTS / "gpu_engine.md"
BATCHES = (1, 8, 32, 64)


def median_seconds(run: Callable[[], object], device: str, repeats: int) -> float:
    """The median over `repeats`, after one run that does not count."""
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def encode_rows(
    path: Path, device: str, dtype: torch.dtype, side: int, repeats: int, limits: DeviceLimits
) -> list[str]:
    encoder = load_encoder(path, device=torch.device(device), dtype=dtype)
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    item = encoder.preprocess(Image.fromarray(pixels), {})
    rows = []
    for count in (1, 8):
        seconds = median_seconds(lambda n=count: encoder.encode([item] * n), device, repeats)  # type: ignore[misc]
        patches = count * item.cost
        rows.append(
            f"| encode {count} x {side} px ({item.rows} rows each) | {seconds * 1e3:.2f} ms "
            f"| {patches / seconds:.0f} patches/s "
            f"| {tower_work(encoder, [item] * count).ratio(seconds, limits)} |"
        )
    return rows


def prompts_of(count: int, length: int, vocabulary: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(vocabulary // 2) for _ in range(length)] for _ in range(count)]


def prefill_rows(
    engine: Engine,
    size: DecoderSize,
    length: int,
    chunk: int,
    device: str,
    repeats: int,
    limits: DeviceLimits,
) -> list[str]:
    """A row for each step of one prompt, of `chunk` tokens."""
    times: list[list[float]] = []
    for _ in range(repeats + 1):
        prompts = prompts_of(1, length, engine.runner.vocab_size)
        (request,) = make_requests(engine, prompts, 1, engine.runner.position_rows)
        engine.scheduler.check(request)
        engine.scheduler.add(request, 0.0)
        times.append([])
        while not request.output_token_ids:
            synchronize(device)
            start = time.perf_counter()
            engine_step(engine)
            synchronize(device)
            times[-1].append(time.perf_counter() - start)
    lines = []
    for index, taken in enumerate(zip(*times[1:], strict=True)):
        seconds, context = statistics.median(taken), index * chunk
        count = min(chunk, length - context)
        lines.append(
            f"| prefill {count} tokens behind {context} | {seconds * 1e3:.2f} ms "
            f"| {count / seconds:.0f} tokens/s | {size.prefill(count, context).ratio(seconds, limits)} |"
        )
    return lines


def decode_rows(
    engine: Engine,
    size: DecoderSize,
    length: int,
    tokens: int,
    batches: Sequence[int],
    device: str,
    repeats: int,
    limits: DeviceLimits,
) -> list[str]:
    lines = []
    for batch in batches:
        speeds = []
        for _ in range(repeats + 1):
            prompts = prompts_of(batch, length, engine.runner.vocab_size)
            requests = make_requests(engine, prompts, tokens, engine.runner.position_rows)
            speeds.append(engine_round(engine, requests, device).tokens_per_second)
        speed = statistics.median(speeds[1:])
        # The steps' mean context.
        work = size.decode(batch, length + tokens / 2)
        lines.append(
            f"| decode, batch {batch}, context {length} | {batch / speed * 1e3:.2f} ms a step "
            f"| {speed:.0f} tokens/s | {work.ratio(batch / speed, limits)} |"
        )
    return lines


def measure(arguments: argparse.Namespace, limits: DeviceLimits) -> list[str]:
    path, device = arguments.model, arguments.device
    dtype = getattr(torch, arguments.dtype)
    rows = encode_rows(path, device, dtype, arguments.side, arguments.repeats, limits)
    longest = arguments.prompt + arguments.tokens + 1
    memory = arguments.kv_gib * GIB if device != "cpu" else 512 * MIB
    decoder = load_decoder(path, device=torch.device(device), dtype=dtype, attn_implementation=ATTENTION_NAME)
    engine = make_engine(
        path, device, dtype, decoder, max_model_len=longest, kv_memory=memory,
        max_num_batched_tokens=arguments.chunk, max_num_seqs=max(arguments.batches),
        attention_backend=arguments.attention_backend,
    )  # fmt: skip
    size = decoder_size(decoder)
    rows += prefill_rows(engine, size, arguments.prompt, arguments.chunk, device, arguments.repeats, limits)
    rows += decode_rows(
        engine, size, arguments.prompt, arguments.tokens, arguments.batches, device, arguments.repeats, limits
    )
    return rows


def report(rows: list[str], arguments: argparse.Namespace, limits: DeviceLimits) -> str:
    command = command_of(
        "engine", arguments, "side", "prompt", "chunk", "tokens", "repeats", "attention_backend"
    )
    body = [
        limits.said(),
        "",
        *table("what", "time", "rate", "share of the limit"),
        *rows,
    ]
    return page("Encode, prefill and decode", command, arguments.device, "medians", body)


def main(argv: list[str] | None = None) -> None:
    parser = gpu_parser(__doc__, RESULT)
    parser.add_argument("--chunk", type=int, default=4096, help="tokens of a step (--max-num-batched-tokens)")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="sequences that decode")
    parser.add_argument("--attention-backend", default="sdpa", choices=BACKENDS)
    arguments = parser.parse_args(argv)
    limits = limits_of(arguments)
    text = report(measure(arguments, limits), arguments, limits)
    publish(text, RESULT, write=arguments.write)


if __name__ == "__main__":
    main()

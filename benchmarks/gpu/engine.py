"""Encode, prefill and decode of one checkpoint in absolute time, with the chip and the versions.

    python -m benchmarks.gpu.engine MODEL [--device cuda] [--dtype bfloat16] [--side 640]
        [--attention-backend flex] [--write]
    python -m benchmarks.gpu.engine MODEL --device cpu --dtype float32 --side 64 --prompt 64 --tokens 8

Encode: seconds of the tower over 1 and 8 pictures of `side` pixels. Prefill: seconds from submission to
the first token of one prompt. Decode: tokens per second and milliseconds per step by batch.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image

from benchmarks.micro.engine_decode import engine_round, make_engine, make_requests, synchronize
from benchmarks.result_page import RESULTS, add_write_flag, publish
from triptych.config import GIB, MIB
from triptych.goodput.report.machine import chip
from triptych.models.registry import load_encoder
from triptych.pd_worker.attention.backends import BACKENDS
from triptych.pd_worker.engine import Engine

RESULT = RESULTS / "gpu_engine.md"
BATCHES = (1, 8, 32, 64)


def device_name(device: str) -> str:
    return chip() if device == "cpu" else torch.cuda.get_device_name(device)


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


def encode_rows(path: Path, device: str, dtype: torch.dtype, side: int, repeats: int) -> list[str]:
    encoder = load_encoder(path, device=torch.device(device), dtype=dtype)
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    item = encoder.preprocess(Image.fromarray(pixels), {})
    rows = []
    for count in (1, 8):
        seconds = median_seconds(lambda n=count: encoder.encode([item] * n), device, repeats)  # type: ignore[misc]
        patches = count * item.cost
        rows.append(
            f"| encode {count} x {side} px ({item.rows} rows each) | {seconds * 1e3:.2f} ms "
            f"| {patches / seconds:.0f} patches/s |"
        )
    return rows


def prompts_of(count: int, length: int, vocabulary: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(vocabulary // 2) for _ in range(length)] for _ in range(count)]


def prefill_row(engine: Engine, length: int, vocabulary: int, device: str, repeats: int) -> str:
    rows = engine.runner.position_rows

    def run() -> None:
        engine_round(engine, make_requests(engine, prompts_of(1, length, vocabulary), 1, rows), device)

    seconds = median_seconds(run, device, repeats)
    return f"| prefill {length} tokens | {seconds * 1e3:.2f} ms | {length / seconds:.0f} tokens/s |"


def decode_rows(
    engine: Engine, length: int, tokens: int, vocabulary: int, device: str, repeats: int
) -> list[str]:
    lines = []
    for batch in BATCHES:
        speeds = []
        for _ in range(repeats + 1):
            prompts = prompts_of(batch, length, vocabulary)
            requests = make_requests(engine, prompts, tokens, engine.runner.position_rows)
            speeds.append(engine_round(engine, requests, device).tokens_per_second)
        speed = statistics.median(speeds[1:])
        lines.append(
            f"| decode, batch {batch}, context {length} | {batch / speed * 1e3:.2f} ms a step "
            f"| {speed:.0f} tokens/s |"
        )
    return lines


def measure(arguments: argparse.Namespace) -> list[str]:
    path, device = arguments.model, arguments.device
    dtype = getattr(torch, arguments.dtype)
    rows = encode_rows(path, device, dtype, arguments.side, arguments.repeats)
    longest = arguments.prompt + arguments.tokens + 1
    memory = arguments.kv_gib * GIB if device != "cpu" else 512 * MIB
    engine = make_engine(
        path, device, dtype, max_model_len=longest, kv_memory=memory,
        max_num_batched_tokens=max(4096, arguments.prompt), max_num_seqs=max(BATCHES),
        attention_backend=arguments.attention_backend,
    )  # fmt: skip
    vocabulary = engine.runner.vocab_size
    rows.append(prefill_row(engine, arguments.prompt, vocabulary, device, arguments.repeats))
    rows += decode_rows(engine, arguments.prompt, arguments.tokens, vocabulary, device, arguments.repeats)
    return rows


def report(rows: list[str], arguments: argparse.Namespace) -> str:
    command = (
        f"python -m benchmarks.gpu.engine {arguments.title} --device {arguments.device} "
        f"--dtype {arguments.dtype} --side {arguments.side} --prompt {arguments.prompt} "
        f"--tokens {arguments.tokens} --repeats {arguments.repeats} "
        f"--attention-backend {arguments.attention_backend}"
    )
    head = [
        "# Encode, prefill and decode",
        "",
        f"`{command}`, {datetime.now(UTC):%Y-%m-%d}, {device_name(arguments.device)}, "
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, transformers {transformers.__version__}; "
        "medians.",
        "",
        "| what | time | rate |",
        "|---|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--title", default="MODEL", help="how the result names the checkpoint")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--side", type=int, default=640)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--attention-backend", default="sdpa", choices=BACKENDS)
    parser.add_argument("--kv-gib", type=int, default=16)
    add_write_flag(parser, RESULT)
    arguments = parser.parse_args(argv)
    text = report(measure(arguments), arguments)
    publish(text, RESULT, write=arguments.write)


if __name__ == "__main__":
    main()

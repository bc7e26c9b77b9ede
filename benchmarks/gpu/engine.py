"""Encode, prefill and decode of one checkpoint in absolute time, with the chip and the versions.

    python -m benchmarks.gpu.engine MODEL [--device cuda] [--dtype bfloat16] [--side 640]
        [--attention-backend sdpa] [--chunk 512] [--write]
    python -m benchmarks.gpu.engine MODEL --device cpu --dtype float32 --side 64 --prompt 64 --tokens 8

Encode: seconds of the tower over 1 and 8 pictures of `side` pixels. Prefill: seconds of each step of
one prompt, `chunk` tokens each. Decode: tokens per second and milliseconds per step by batch. Each with its
share of the device's limit, of bandwidth or arithmetic.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.gpu.device_limits import (
    DecoderSize,
    DeviceLimits,
    decoder_size,
    device_name,
    known_limits,
    tower_work,
)
from benchmarks.gpu.engine_rounds import (
    engine_step,
    make_engine,
    make_requests,
    median_seconds,
    timings,
    tokens_per_second,
)
from benchmarks.result_page import RESULTS, page_parser, publish, table
from triptych.base.config import GIB, MIB
from triptych.base.types import MMFeature, Placement
from triptych.ec_connector.base import EncoderOutput
from triptych.models.base import EncoderSide
from triptych.models.registry import load_decoder, load_encoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME, BACKENDS
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.engine import Engine

RESULT = RESULTS / "gpu_engine.md"
BATCHES = (1, 8, 32, 64)
COLUMNS = ("what", "time", "rate", "share of the limit")
Row = tuple[str, str, str, str]


def encode_rows(encoder: EncoderSide, side: int, repeats: int, limits: DeviceLimits) -> Iterator[Row]:
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    item = encoder.preprocess(Image.fromarray(pixels), {})
    for count in (1, 8):
        items = [item] * count
        seconds = median_seconds(partial(encoder.encode, items), encoder.device.type, repeats)
        yield (
            f"encode {count} x {side} px ({item.rows} rows each)",
            f"{seconds * 1e3:.2f} ms",
            f"{count * item.cost / seconds:.0f} patches/s",
            tower_work(encoder, items).ratio(seconds, limits),
        )


@dataclass(frozen=True, slots=True)
class EngineBench:
    """An engine with what its steps are compared with. `output`: what an encoder-decoder model attends to."""

    engine: Engine
    size: DecoderSize
    device: str
    limits: DeviceLimits
    repeats: int
    output: EncoderOutput | None = None

    def requests(self, batch: int, length: int, tokens: int, *, sampled: bool = False) -> list[EngineRequest]:
        """Random prompts; `sampled` as Qwen3-VL's own generation_config says."""
        runner, rng = self.engine.runner, random.Random(batch)
        vocabulary = runner.vocab_size // 2
        prompts = [[rng.randrange(vocabulary) for _ in range(length)] for _ in range(batch)]
        made = make_requests(self.engine, prompts, tokens, runner.position_rows)
        if sampled:
            chosen = replace(made[0].sampling, temperature=0.7, top_p=0.8, top_k=20)
            made = [replace(request, sampling=replace(chosen, seed=n)) for n, request in enumerate(made)]
        if self.output is not None:
            features, ready = (MMFeature(self.output.plan, Placement(0, 0)),), {self.output.plan.mm_hash}
            made = [replace(request, features=features, ready=frozenset(ready)) for request in made]
        return made

    def prefill(self, length: int, chunk: int) -> Iterator[Row]:
        """A row for each step of one prompt; steps of `chunk` tokens."""
        times: list[list[float]] = []
        for _ in range(self.repeats + 1):
            (request,) = self.requests(1, length, 1)
            self.engine.scheduler.check(request)
            self.engine.scheduler.add(request, 0.0)
            times.append([])
            while not request.output_token_ids:
                times[-1] += timings(partial(engine_step, self.engine), self.device, 1, warm_up=0)
        for index, taken in enumerate(zip(*times[1:], strict=True)):
            seconds, context = statistics.median(taken), index * chunk
            count = min(chunk, length - context)
            yield (
                f"prefill {count} tokens behind {context}",
                f"{seconds * 1e3:.2f} ms",
                f"{count / seconds:.0f} tokens/s",
                self.size.prefill(count, context).ratio(seconds, self.limits),
            )

    def decode(self, batch: int, length: int, tokens: int, *, sampled: bool = False, how: str = "") -> Row:
        """A decode step of `batch` sequences; `how` is added to the row's first cell."""
        speeds = []
        for _ in range(self.repeats + 1):
            requests = self.requests(batch, length, tokens, sampled=sampled)
            speeds.append(tokens_per_second(self.engine, requests, self.device))
        if not (speed := statistics.median(speeds[1:])):
            raise SystemExit(f"batch {batch}: no step decodes all: give a larger --chunk, or more --tokens")
        seconds = batch / speed
        # The steps' mean context, and the encoder's rows, whose keys and values are read likewise.
        context = length + tokens / 2 + (0 if self.output is None else self.output.plan.rows)
        return (
            f"decode, batch {batch}, context {length}{how}",
            f"{seconds * 1e3:.2f} ms a step",
            f"{batch / seconds:.0f} tokens/s",
            self.size.decode(batch, context).ratio(seconds, self.limits),
        )


def measure(arguments: argparse.Namespace, limits: DeviceLimits) -> list[Row]:
    path, device, dtype = arguments.model, torch.device(arguments.device), getattr(torch, arguments.dtype)
    encoder = load_encoder(path, device=device, dtype=dtype)
    rows = [*encode_rows(encoder, arguments.side, arguments.repeats, limits)]
    decoder = load_decoder(path, device=device, dtype=dtype, attn_implementation=ATTENTION_NAME)
    size, max_model_len = decoder_size(decoder), arguments.prompt + arguments.tokens + 1
    host = 512 * MIB + max(arguments.batches) * max_model_len * size.token_bytes
    engine = make_engine(
        path, decoder, max_model_len=max_model_len,
        kv_memory=arguments.kv_gib * GIB if arguments.device != "cpu" else host,
        max_num_batched_tokens=arguments.chunk, max_num_seqs=max(arguments.batches),
        attention_backend=arguments.attention_backend,
    )  # fmt: skip
    bench = EngineBench(engine, size, arguments.device, limits, arguments.repeats)
    rows += bench.prefill(arguments.prompt, arguments.chunk)
    return rows + [bench.decode(batch, arguments.prompt, arguments.tokens) for batch in arguments.batches]


def report(rows: Sequence[Row], arguments: argparse.Namespace, limits: DeviceLimits) -> str:
    names = ("device", "dtype", "side", "prompt", "chunk", "tokens", "repeats", "attention_backend")
    flags = (f" --{name.replace('_', '-')} {getattr(arguments, name)}" for name in names)
    command = f"python -m benchmarks.gpu.engine {arguments.title}{''.join(flags)}"
    how = f"`{command}`, {datetime.now(UTC):%Y-%m-%d}, {device_name(arguments.device)}, "
    how += f"torch {torch.__version__}, CUDA {torch.version.cuda}; medians."
    lines = ["# Encode, prefill and decode", "", how, "", limits.said(), "", *table(COLUMNS, rows), ""]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = page_parser(__doc__, RESULT, prompt=1024, tokens=128, repeats=5, side=640)
    parser.add_argument("model", type=Path)
    parser.add_argument("--title", default="MODEL", help="how the result names the checkpoint")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--kv-gib", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=4096, help="tokens of a step (--max-num-batched-tokens)")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="sequences that decode")
    parser.add_argument("--attention-backend", default="auto", choices=BACKENDS)
    arguments = parser.parse_args(argv)
    limits = known_limits(arguments.device, getattr(torch, arguments.dtype))
    publish(report(measure(arguments, limits), arguments, limits), RESULT, write=arguments.write)


if __name__ == "__main__":
    main()

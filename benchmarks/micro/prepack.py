"""Steps and tower as they are served, without fused layers, and with plain weights too, interleaved.

    python -m benchmarks prepack NAME=MODEL:DTYPE:THREADS ... [--rounds 5] [--tokens 16] [--write]

Engines decode the same random prompts, and towers encode the same picture. The sides differ in
`triptych.models.fused` and in `triptych.models.weights.prepack` alone. The time of a step is of those in
which all sequences decode.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.micro.engine_decode import engine_round, make_engine, make_requests
from benchmarks.result_page import RESULTS, add_write_flag, publish
from triptych.config import GIB
from triptych.goodput.report.machine import chip
from triptych.models.base import DecoderSide, EncoderSide, PreparedItem
from triptych.models.registry import family_of
from triptych.models.weights.prepack import prepack
from triptych.pd_worker.attention.attention import ATTENTION_NAME
from triptych.pd_worker.engine import Engine

Side = TypeVar("Side", DecoderSide, EncoderSide)

RESULT = RESULTS / "prepack.md"
CPU = torch.device("cpu")
#: Sequences that decode, with prompts of so many tokens.
COUNTS, PROMPT = (1, 2, 4, 8, 16), 100
#: Side of the square pictures, in pixels.
PICTURES = (160, 320, 640)


def prepared(load: Callable[[], Side], *, many_rows: bool) -> list[Side]:
    """Three sides: as they are served, with prepacked weights alone, and plain."""
    sides = [load() for _ in range(3)]
    sides[0].fuse()
    for side in sides[:2]:
        prepack(side.module, many_rows=many_rows)
    return sides


def steps(path: Path, dtype: torch.dtype, tokens: int, rounds: int) -> list[str]:
    """A row for every number of sequences."""
    decoder = family_of(path).decoder
    sides = prepared(
        lambda: decoder.load(path, device=CPU, dtype=dtype, attn_implementation=ATTENTION_NAME),
        many_rows=False,
    )
    flags: dict[str, Any] = {
        "max_model_len": PROMPT + tokens + 1,
        "kv_memory": GIB,
        "max_num_batched_tokens": 2048,
    }
    engines = [make_engine(path, "cpu", dtype, side, **flags) for side in sides]
    rows = []
    for count in COUNTS:
        seeded = random.Random(0)
        highest = engines[0].runner.vocab_size // 2
        prompts = [[seeded.randrange(highest) for _ in range(PROMPT)] for _ in range(count)]
        outputs: list[list[list[int]]] = []
        calls = [partial(step_seconds, engine, prompts, tokens, outputs) for engine in engines]
        medians = in_turns(calls, rounds)
        equal = all(output == outputs[0] for output in outputs)
        rows.append(row(f"step of {count}", medians, "yes" if equal else "NO"))
    return rows


def step_seconds(
    engine: Engine, prompts: list[list[int]], tokens: int, outputs: list[list[list[int]]]
) -> float:
    """Seconds of a step in which all prompts decode; what was generated is added to `outputs`."""
    requests = make_requests(engine, prompts, tokens, engine.runner.position_rows)
    seconds = len(prompts) / engine_round(engine, requests).tokens_per_second
    outputs.append([request.output_token_ids for request in requests])
    return seconds


def pictures(path: Path, dtype: torch.dtype, rounds: int) -> list[str]:
    """A row for every size."""
    encoder = family_of(path).encoder
    sides = prepared(lambda: encoder.load(path, device=CPU, dtype=dtype), many_rows=True)
    rows = []
    for size in PICTURES:
        item = sides[0].preprocess(torch.rand(3, size, size), {})
        calls = [partial(encode_seconds, side, item) for side in sides]
        rows.append(row(f"tower, {size}x{size}", in_turns(calls, rounds), "-"))
    return rows


def encode_seconds(side: EncoderSide, item: PreparedItem) -> float:
    began = time.perf_counter()
    side.encode([item])
    return time.perf_counter() - began


def in_turns(calls: Sequence[Callable[[], float]], rounds: int) -> list[float]:
    """The median of what each call returns; each begins a round in turn; the first round is not counted."""
    found: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds + 1):
        for offset in range(len(calls)):
            side = (turn + offset) % len(calls)
            found[side].append(calls[side]())
    return [statistics.median(seconds[1:]) for seconds in found]


def row(what: str, seconds: Sequence[float], equal: str) -> str:
    served, unfused, plain = seconds
    return (
        f"| {what} | {served * 1e3:.2f} | {unfused * 1e3:.2f} | {served / unfused:.2f} "
        f"| {plain * 1e3:.2f} | {unfused / plain:.2f} | {equal} |"
    )


def section(spec: str, tokens: int, rounds: int) -> list[str]:
    """Heading and table of one NAME=MODEL:DTYPE:THREADS."""
    name, _, rest = spec.partition("=")
    path, dtype_name, threads = rest.rsplit(":", 2)
    dtype = getattr(torch, dtype_name)
    torch.set_num_threads(int(threads))
    return [
        f"## {name}, {dtype_name}, {threads} thread{'s' if int(threads) > 1 else ''}",
        "",
        "| | ms as served | ms not fused | fused / not | ms plain too | prepacked / plain | tokens equal |",
        "|---|---:|---:|---:|---:|---:|---|",
        *steps(Path(path), dtype, tokens, rounds),
        *pictures(Path(path), dtype, rounds),
        "",
    ]


def report(sections: Sequence[Sequence[str]], arguments: argparse.Namespace) -> str:
    lines = [
        "# Fused layers and prepacked weights",
        "",
        f"`python -m benchmarks prepack ... --rounds {arguments.rounds} --tokens {arguments.tokens}`, "
        f"{datetime.now(UTC):%Y-%m-%d}, {chip()}, torch {torch.__version__}, prompts of {PROMPT} tokens, "
        f"medians of interleaved rounds. Load average at the end: {os.getloadavg()[0]:.1f}.",
        "",
    ]
    return "\n".join([*lines, *(line for section in sections for line in section)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL:DTYPE:THREADS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16)
    add_write_flag(parser, RESULT)
    arguments = parser.parse_args()
    sections = [section(spec, arguments.tokens, arguments.rounds) for spec in arguments.models]
    text = report(sections, arguments)
    publish(text, RESULT, write=arguments.write)


if __name__ == "__main__":
    main()

"""Steps and tower with prepacked and with plain weights, in one interleaved run.

    python -m benchmarks prepack NAME=MODEL:DTYPE:THREADS ... [--rounds 5] [--tokens 16] [--write]

Two engines decode the same random prompts, and two towers encode the same picture; the sides differ in
`triptych.models.weights.prepack` alone. The time of a step is of those in which all sequences decode.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.micro.decode_view import first_and_second, step_times
from benchmarks.micro.engine_decode import make_engine
from benchmarks.result_page import RESULTS, add_write_flag, publish
from triptych.config import GIB
from triptych.goodput.report.machine import chip
from triptych.models.registry import family_of, load_encoder
from triptych.pd_worker.attention.attention import ATTENTION_NAME

RESULT = RESULTS / "prepack.md"
CPU = torch.device("cpu")
#: Sequences that decode, with prompts of so many tokens.
COUNTS, PROMPT = (1, 2, 4, 8, 16), 100
#: Side of the square pictures, in pixels.
PICTURES = (160, 320, 640)


def steps(path: Path, dtype: torch.dtype, tokens: int, rounds: int) -> list[str]:
    """A row for every number of sequences."""
    plain = family_of(path).decoder.load(path, device=CPU, dtype=dtype, attn_implementation=ATTENTION_NAME)
    flags: dict[str, Any] = {
        "max_model_len": PROMPT + tokens + 1,
        "kv_memory": GIB,
        "max_num_batched_tokens": 2048,
    }
    engines = (make_engine(path, "cpu", dtype, **flags), make_engine(path, "cpu", dtype, plain, **flags))
    rows = []
    for count in COUNTS:
        packed, unpacked, equal = step_times(engines, count, PROMPT, tokens, rounds)
        rows.append(row(f"step of {count}", packed, unpacked, "yes" if equal else "NO"))
    return rows


def pictures(path: Path, dtype: torch.dtype, rounds: int) -> list[str]:
    """A row for every size."""
    sides = (
        load_encoder(path, device=CPU, dtype=dtype),
        family_of(path).encoder.load(path, device=CPU, dtype=dtype),
    )
    rows = []
    for size in PICTURES:
        item = sides[0].preprocess(torch.rand(3, size, size), {})
        seconds: tuple[list[float], list[float]] = ([], [])
        # The first round is not counted.
        for turn in range(rounds + 1):
            for side in first_and_second(turn):
                began = time.perf_counter()
                sides[side].encode([item])
                seconds[side].append(time.perf_counter() - began)
        packed, plain = (statistics.median(found[1:]) for found in seconds)
        rows.append(row(f"tower, {size}x{size}", packed, plain, "-"))
    return rows


def row(what: str, packed: float, plain: float, equal: str) -> str:
    return f"| {what} | {packed * 1e3:.2f} | {plain * 1e3:.2f} | {packed / plain:.2f} | {equal} |"


def section(spec: str, tokens: int, rounds: int) -> list[str]:
    """Heading and table of one NAME=MODEL:DTYPE:THREADS."""
    name, _, rest = spec.partition("=")
    path, dtype_name, threads = rest.rsplit(":", 2)
    dtype = getattr(torch, dtype_name)
    torch.set_num_threads(int(threads))
    return [
        f"## {name}, {dtype_name}, {threads} thread{'s' if int(threads) > 1 else ''}",
        "",
        "| | ms prepacked | ms plain | ratio | tokens equal |",
        "|---|---:|---:|---:|---|",
        *steps(Path(path), dtype, tokens, rounds),
        *pictures(Path(path), dtype, rounds),
        "",
    ]


def report(sections: Sequence[Sequence[str]], arguments: argparse.Namespace) -> str:
    lines = [
        "# Prepacked weights",
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

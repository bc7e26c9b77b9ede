"""A decode step with and without a view of the decoding sequences, in one interleaved run.

    python -m benchmarks decode_view MODEL [--rounds 5] [--tokens 16] [--write]

Two engines decode the same random prompts, one with rows that are kept from step to step, one that gathers
from the blocks. The time is of steps in which all sequences decode.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.micro.engine_decode import engine_round, make_engine, make_requests
from benchmarks.result_page import RESULTS, add_write_flag, publish
from triptych.config import GIB
from triptych.goodput.report.machine import chip
from triptych.pd_worker.engine import Engine

RESULT = RESULTS / "decode_view.md"
#: Sequences, and tokens of each prompt.
SHAPES = ((1, 100), (8, 100), (16, 100), (1, 1500), (8, 1500), (16, 1500))
_Times = tuple[float, float, bool]


def make_pair(path: Path, tokens: int) -> tuple[Engine, Engine]:
    """With the view, and without it."""
    longest = max(length for _, length in SHAPES) + tokens + 1
    viewing, gathering = (
        make_engine(
            path, "cpu", torch.float32, max_model_len=longest, kv_memory=GIB, max_num_batched_tokens=2048
        )
        for _ in range(2)
    )
    gathering.runner.use_view(0)
    return viewing, gathering


def step_times(engines: tuple[Engine, Engine], count: int, length: int, tokens: int, rounds: int) -> _Times:
    """Medians of seconds of a step, with and without, and whether all tokens were equal."""
    seeded = random.Random(0)
    highest = engines[0].runner.vocab_size // 2
    prompts = [[seeded.randrange(highest) for _ in range(length)] for _ in range(count)]
    seconds: tuple[list[float], list[float]] = ([], [])
    outputs = []
    # The first round is not counted.
    for turn in range(rounds + 1):
        for side in first_and_second(turn):
            engine = engines[side]
            requests = make_requests(engine, prompts, tokens, engine.runner.position_rows)
            seconds[side].append(count / engine_round(engine, requests).tokens_per_second)
            outputs.append([request.output_token_ids for request in requests])
    medians = [statistics.median(found[1:]) for found in seconds]
    return medians[0], medians[1], all(output == outputs[0] for output in outputs)


def first_and_second(turn: int) -> tuple[int, int]:
    """Which of two sides begins a round: each in turn, since the second one finds the other's caches."""
    return (1, 0) if turn % 2 else (0, 1)


def report(times: dict[tuple[int, int], _Times], arguments: argparse.Namespace) -> str:
    lines = [
        "# A view of the decoding sequences",
        "",
        f"`python -m benchmarks decode_view {arguments.title} --rounds {arguments.rounds} --tokens "
        f"{arguments.tokens}`, {datetime.now(UTC):%Y-%m-%d}, {chip()}, torch {torch.__version__}, fp32, one "
        "thread, medians of interleaved rounds. Load average at the end: "
        f"{os.getloadavg()[0]:.1f}.",
        "",
        "| sequences | tokens of each | ms a step with the view | gathered | ratio | tokens equal |",
        "|---:|---:|---:|---:|---:|---|",
    ]
    for (count, length), (view, gathered, equal) in times.items():
        lines.append(
            f"| {count} | {length} | {view * 1e3:.2f} | {gathered * 1e3:.2f} | {view / gathered:.2f} "
            f"| {'yes' if equal else 'NO'} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--title", default="MODEL", help="how the result names the checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16)
    add_write_flag(parser, RESULT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    engines = make_pair(arguments.model, arguments.tokens)
    times = {
        shape: step_times(engines, *shape, tokens=arguments.tokens, rounds=arguments.rounds)
        for shape in SHAPES
    }
    text = report(times, arguments)
    publish(text, RESULT, write=arguments.write)


if __name__ == "__main__":
    main()

"""CPU time of the sampler for all rows of a step at once, beside the same rows one by one, one thread."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from triptych.base.types import SamplingParams
from triptych.models.base import GenerationDefaults
from triptych.pd_worker.core.sampling import resolve
from triptych.pd_worker.runner.sampler import SamplerInput, sample

_KINDS: dict[str, dict[str, Any]] = {
    "penalised, greedy": {"temperature": 0.0, "frequency_penalty": 0.5},
    "temperature": {"temperature": 1.0},
    "top_k, top_p": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "top_k, top_p, penalties": {
        "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1, "presence_penalty": 0.5,
    },
}  # fmt: skip


def inputs(rows: int, fields: dict[str, Any]) -> list[SamplerInput]:
    """Requests of 1,000 prompt tokens and 200 output tokens."""
    prompt, output = tuple(range(500, 1500)), tuple(range(200))
    defaults = GenerationDefaults(eos_token_ids=(1,))
    params = [resolve(SamplingParams(seed=seed, **fields), defaults, 1000, 10000) for seed in range(rows)]
    return [SamplerInput(each, output, len(output), (1,), prompt) for each in params]


def micros(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1e6


def measure(rows: int, vocab: int, fields: dict[str, Any], repeats: int) -> tuple[float, float]:
    """Median CPU microseconds of a step: at once, and row by row; interleaved."""
    logits, requests = torch.randn(rows, vocab) * 4, inputs(rows, fields)

    def one_by_one() -> None:
        for row in range(rows):
            sample(logits[row : row + 1], requests[row : row + 1])

    times = [(micros(lambda: sample(logits, requests)), micros(one_by_one)) for _ in range(repeats + 2)]
    at_once, alone = zip(*times[2:], strict=True)
    return statistics.median(at_once), statistics.median(alone)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--vocab", type=int, nargs="+", default=[4096, 151936])
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.stdout.write(
        "| sampled | rows | vocabulary | at once, us | one by one, us | ratio |\n|---|---|---|---|---|---|\n"
    )
    for name, fields in _KINDS.items():
        for vocab in options.vocab:
            for rows in options.rows:
                at_once, alone = measure(rows, vocab, fields, options.repeats)
                ratio = at_once / alone
                line = f"| {name} | {rows} | {vocab} | {at_once:.0f} | {alone:.0f} | {ratio:.2f} |\n"
                sys.stdout.write(line)
    return 0

"""The engine's CPU time for a first and a second question about a picture, with states kept and without.

    python tests/tools/second_question.py [--classes Qwen3_5 Lfm2Vl] [--tokens 2000] [--rounds 15]

A picture stands in the middle of `tokens` tokens; the second question has another end. Tiny checkpoints with
random weights: a step's fixed cost weighs more than with any real model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.engine.engine_cell import EngineCell, engine_cell
from support.zoo.engine import Served
from support.zoo.models import RECIPES, Prompt, make_prompt

KEPT, NOT_KEPT, SECOND = "first, states kept", "first, none kept", "second"
_BOUNDARIES = "triptych.pd_worker.core.kv_cache.kv_cache_manager.boundaries_of"
#: Tokens behind the picture that the second question has otherwise.
_END = 8


class Questions:
    """Questions about one picture to one engine, by the CPU seconds of its thread."""

    def __init__(self, served: Served, cell: EngineCell, tokens: int) -> None:
        self._served, self._cell = served, cell
        self._picture = make_prompt(RECIPES[served.recipe.name], 1, (0,))
        self._tokens = tokens
        self._drawn = torch.Generator().manual_seed(5)
        self._spent = 0.0
        engine: Any = cell.engine
        self._execute = engine._execute
        engine._execute = self._timed

    def _timed(self, output: Any) -> Any:
        began = time.thread_time()
        try:
            return self._execute(output)
        finally:
            self._spent += time.thread_time() - began

    def first(self) -> Prompt:
        """A text that nobody has seen, and the picture in its middle."""
        count = self._tokens - len(self._picture.token_ids)
        text = torch.randint(20, 60, (count,), generator=self._drawn).tolist()
        ids = [*text[: count // 2], *self._picture.token_ids, *text[count // 2 :]]
        return Prompt(ids, self._picture.items)

    def second(self, first: Prompt) -> Prompt:
        return Prompt([*first.token_ids[:-_END], *range(20, 20 + _END)], first.items)

    def seconds(self, prompt: Prompt) -> float:
        self._spent = 0.0
        self._cell.finish([self._served.request(self._cell, prompt, 1)])
        return self._spent


def measured(name: str, tokens: int, rounds: int, budget: int) -> dict[str, list[float]]:
    """CPU seconds by question, of each round."""
    served = Served.open(f"{name}ForConditionalGeneration")
    seconds: dict[str, list[float]] = {KEPT: [], NOT_KEPT: [], SECOND: []}
    flags: dict[str, Any] = {"block_size": 16, "max_model_len": 2048, "kv_memory": 64 << 20}
    with engine_cell(served, max_num_batched_tokens=budget, **flags) as cell:
        questions = Questions(served, cell, tokens)
        for turn in range(rounds + 1):
            took = {}
            for which in (KEPT, NOT_KEPT) if turn % 2 else (NOT_KEPT, KEPT):
                prompt = questions.first()
                if which == KEPT:
                    took[KEPT] = questions.seconds(prompt)
                    took[SECOND] = questions.seconds(questions.second(prompt))
                else:
                    with mock.patch(_BOUNDARIES, lambda *given, **named: ()):
                        took[NOT_KEPT] = questions.seconds(prompt)
            for question, value in took.items() if turn else ():
                seconds[question].append(value)
    return seconds


def ratio(some: list[float], others: list[float]) -> float:
    """The median of the rounds' ratios: what disturbs a round disturbs both."""
    return statistics.median(one / other for one, other in zip(some, others, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--classes", nargs="+", default=["Qwen3_5", "Lfm2Vl"])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=int, default=512, help="--max-num-batched-tokens")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.classes:
        took = measured(name, args.tokens, args.rounds, args.budget)
        medians = {question: statistics.median(values) for question, values in took.items()}
        times = ", ".join(f"{question} {1000 * value:.1f} ms" for question, value in medians.items())
        speed, second = ratio(took[NOT_KEPT], took[KEPT]), ratio(took[SECOND], took[KEPT])
        print(f"{name}: {times}; first {speed:.2f} of the speed without, second {second:.2f} of the first")


if __name__ == "__main__":
    main()

"""A step waits for the device once, for all of its tokens. On a CPU, what would wait is counted."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from support.engine.engine_cell import EngineCell, Prompt, engine_cell, reference
from support.graphs import Waits
from triptych.pd_worker.core.sampling import ResolvedSampling

PROMPTS = [
    Prompt("What is this?", ((1, 96, 64),)),
    Prompt("Say something about the weather, and then about the sea."),
    Prompt("And these?", ((2, 64, 96), (1, 96, 64))),
    Prompt("One more."),
    Prompt("And the last one."),
]
#: Greedy, Qwen3-VL's own defaults, and what else requests can ask for.
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "logprobs": 3},
    {"temperature": 1.0, "top_k": 50, "min_p": 0.1, "repetition_penalty": 1.1},
    {"temperature": 1.0, "min_tokens": 6, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"min_tokens": 3, "logit_bias": ((5, 1.0),)},
]


def count_waits(patch: pytest.MonkeyPatch, cell: EngineCell) -> list[list[str]]:
    """What each step waits for from now on, from the first layer to its events."""
    runner: Any = cell.engine.runner
    hidden, compute = runner._hidden, runner._compute
    steps: list[list[str]] = []

    def counted(*args: Any) -> None:
        with ExitStack() as stack:

            def begin(*batch: Any) -> Any:
                steps.append(stack.enter_context(Waits()).names)
                return hidden(*batch)

            patch.setattr(runner, "_hidden", begin)
            compute(*args)

    patch.setattr(runner, "_compute", counted)
    return steps


def test_a_step_waits_once_however_its_rows_are_sampled(checkpoint, monkeypatch):
    with engine_cell(checkpoint, attention_backend="sdpa") as cell:
        cell.answer(PROMPTS[3:4], 2)  # the head is chosen in the first step
        steps = count_waits(monkeypatch, cell)
        requests = []
        for prompt, fields in zip(PROMPTS, SAMPLING, strict=True):
            token_ids = reference(checkpoint.path, prompt, 8).prompt_token_ids
            request = cell.request(prompt, token_ids, 8)
            sampling: ResolvedSampling = replace(request.sampling, **fields)
            requests.append(replace(request, sampling=sampling))
        cell.finish(requests)
    assert len(steps) >= 8
    assert {tuple(names) for names in steps} == {("tolist",)}

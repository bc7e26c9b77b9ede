from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from support.engine.engine_requests import greedy
from triptych.pd_worker.runner import sampler
from triptych.pd_worker.runner.sampler import SamplerInput


def sample(logits: torch.Tensor, requests: Sequence[SamplerInput]) -> list[int | None]:
    """The tokens as numbers; None for -1."""
    return [None if token < 0 else token for token in sampler.sample(logits, requests).tolist()]


VOCAB = 50
PROMPT = (1, 2, 3, 2, 40)
OUTPUT = (7, 7, 7, 9, 2)


def logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def row(output=OUTPUT, allowed=None, **params) -> SamplerInput:
    resolved = dataclasses.replace(greedy(100), **params)
    return SamplerInput(resolved, output, len(output), (0,), PROMPT, allowed)


def chosen(values: torch.Tensor, count: int = 400, **params) -> set[int]:
    rows = [SamplerInput(row(**params).params, (), position) for position in range(count)]
    return {sample(values, [request])[0] for request in rows}


@pytest.mark.parametrize("seed", range(20))
def test_repetition_penalty_is_that_of_transformers(seed):
    values = logits(seed)
    processor = RepetitionPenaltyLogitsProcessor(1.7)
    expected = processor(torch.tensor([[*PROMPT, *OUTPUT]]), values.clone()).argmax()
    assert sample(values, [row(repetition_penalty=1.7)]) == [int(expected)]


def test_the_prompt_counts_for_repetition_alone():
    values = torch.zeros(1, VOCAB)
    values[0, 3] = 1.0
    assert sample(values, [row((), frequency_penalty=2.0, presence_penalty=2.0)]) == [3]
    values[0, 5] = 0.9
    assert sample(values, [row((), repetition_penalty=2.0)]) == [5]


def test_choices_of_one_request_differ_and_each_is_its_own():
    values = logits(2)
    answers = {}
    for choice in range(4):
        params = dataclasses.replace(greedy(100), temperature=3.0, seed=5, choice=choice)
        rows = [SamplerInput(params, (), position) for position in range(30)]
        answers[choice] = tuple(sample(values, [request])[0] for request in rows)
        assert answers[choice] == tuple(sample(values, [request])[0] for request in rows)
    assert len(set(answers.values())) == 4


def test_a_forbidden_token_never_comes():
    allowed = np.zeros(VOCAB - 10, dtype=bool)
    allowed[[4, 6]] = True
    values = torch.zeros(1, VOCAB)
    values[0, -1] = 50.0
    tokens = {
        sample(values, [SamplerInput(row(temperature=2.0).params, (), position, (0,), (), allowed)])[0]
        for position in range(50)
    }
    assert tokens == {4, 6}
    assert sample(values, [row(allowed=allowed)]) == [4]


def test_min_tokens_gives_way_where_the_form_leaves_only_the_end():
    end = np.zeros(VOCAB, dtype=bool)
    end[0] = True
    values = logits(3)
    early = row((), allowed=end, min_tokens=5, stop_token_ids=frozenset({0}), ignore_eos=False)
    assert sample(values, [early]) == [0]
    end[8] = True
    values[0, 0] = 100.0
    assert sample(values, [early]) == [8]

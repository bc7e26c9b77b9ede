from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from support.engine.engine_requests import greedy
from triptych.base.types import SamplingParams
from triptych.models.base import GenerationDefaults
from triptych.pd_worker.core.sampling import resolve
from triptych.pd_worker.runner import sampler
from triptych.pd_worker.runner.sampler import SamplerInput


def sample(logits: torch.Tensor, requests: Sequence[SamplerInput]) -> list[int | None]:
    """The tokens as numbers; None for -1."""
    return [None if token < 0 else token for token in sampler.sample(logits, requests).tolist()]


VOCAB = 50


def row(position: int = 0, output_ids=(), eos=(1,), **params) -> SamplerInput:
    resolved = resolve(SamplingParams(**params), GenerationDefaults(eos_token_ids=eos), 1, 1000)
    return SamplerInput(resolved, list(output_ids), position, eos)


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_masks_what_would_end_the_output(temperature):
    values = torch.zeros(1, VOCAB)
    values[0, [1, 7]] = 100.0
    values[0, 3] = 50.0
    early = row(min_tokens=2, output_ids=[5], stop_token_ids=(7,), temperature=temperature)
    late = row(min_tokens=2, output_ids=[5, 5], stop_token_ids=(7,), temperature=temperature)
    assert sample(values, [early]) == [3]
    assert sample(values, [late])[0] in (1, 7)


def test_min_tokens_masks_the_end_token_of_a_request_that_ignores_it_too():
    values = torch.zeros(1, VOCAB)
    values[0, 1], values[0, 3] = 100.0, 50.0
    ignoring = {"min_tokens": 2, "ignore_eos": True, "temperature": 0.0}
    assert sample(values, [row(output_ids=[5], **ignoring)]) == [3]
    assert sample(values, [row(output_ids=[5, 5], **ignoring)]) == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_word_never_gets_its_last_token(temperature):
    values = torch.zeros(1, VOCAB)
    values[0, 9], values[0, 4] = 100.0, 60.0

    def next_token(*output_ids: int) -> int | None:
        asked = row(temperature=temperature, output_ids=output_ids)
        words = dataclasses.replace(asked.params, bad_word_ids=((7, 8, 9), (3,), (VOCAB + 1,)))
        return sample(values, [dataclasses.replace(asked, params=words)])[0]

    assert [next_token(), next_token(8), next_token(7, 8, 7)] == [9, 9, 9]
    assert [next_token(7, 8), next_token(1, 7, 8)] == [4, 4]
    values[0, 3] = 200.0
    assert next_token() == 9


def test_half_precision_rows_are_sampled_in_float32():
    values = logits(1).bfloat16()
    request = row(temperature=1.0, seed=3)
    assert sample(values, [request]) == sample(values.float(), [request])


class NotTwice:
    """Forbids what was said, in the prompt or since; a rule as checkpoints bring them."""

    def apply(self, logits, prompt_ids, output_ids):
        logits[[*prompt_ids, *output_ids]] = float("-inf")


def test_rules_see_the_whole_prompt_and_all_output_and_leave_the_logits_alone():
    values = logits(1)
    order = values[0].argsort(descending=True).tolist()
    request = dataclasses.replace(
        row(temperature=0.0), rules=(NotTwice(),), prompt=order[:2], output_ids=order[2:5]
    )
    before = values.clone()
    assert not request.plain
    assert sample(values, [request]) == [order[5]]
    assert torch.equal(values, before)


def test_a_rule_that_forces_a_token_wins_over_bias_and_temperature():
    class Forced:
        def apply(self, logits, prompt_ids, output_ids):
            logits.fill_(float("-inf"))
            logits[9] = 0.0

    request = dataclasses.replace(row(temperature=1.5, seed=3, logit_bias=((4, 50.0),)), rules=(Forced(),))
    assert sample(logits(1), [request]) == [9]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "min_tokens": 3},
        {"temperature": 0.7},
        {"temperature": 1.0, "min_p": 0.1, "top_k": 9},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bad", [NAN, INF, "-inf throughout"])
def test_a_row_without_a_finite_best_logit_has_no_token_and_the_others_have_theirs(params, dtype, bad):
    values = logits(3).to(dtype)
    expected = sample(values, [row(position=i, **params) for i in range(3)])
    if bad == "-inf throughout":
        values[1] = -INF
    else:
        values[1, 7] = bad
    assert sample(values, [row(position=i, **params) for i in range(3)]) == [expected[0], None, expected[2]]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_of_minus_infinity_are_tokens_that_never_come(temperature):
    values = torch.full((1, VOCAB), -INF)
    values[0, 4], values[0, 9] = 0.0, 1.0
    tokens = {sample(values, [row(position=p, temperature=temperature)])[0] for p in range(60)}
    assert tokens == ({9} if temperature == 0 else {4, 9})


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_form_may_leave_one_token_but_not_none(temperature):
    one, none = np.zeros(VOCAB, dtype=bool), np.zeros(VOCAB, dtype=bool)
    one[3] = True
    asked = row(temperature=temperature)
    values = logits(2)
    requests = [dataclasses.replace(asked, allowed=one), dataclasses.replace(asked, allowed=none)]
    assert sample(values, requests) == [3, None]


def test_a_tokenizer_may_have_tokens_that_the_model_has_not():
    allowed = np.zeros(VOCAB + 2, dtype=bool)
    allowed[[3, VOCAB]] = True
    assert sample(logits(1), [dataclasses.replace(row(temperature=0.0), allowed=allowed)]) == [3]


def test_a_rule_that_forces_an_end_goes_before_the_least_number_of_tokens():
    class End:
        def apply(self, logits, prompt, output):
            kept = logits[1].clone()
            logits.fill_(-INF)
            logits[1] = kept

    request = dataclasses.replace(row(temperature=0.0, min_tokens=5), rules=(End(),))
    assert sample(logits(1), [request]) == [1]


PROMPT = (1, 2, 3, 2, 40)
OUTPUT = (7, 7, 7, 9, 2)


def penalised(output=OUTPUT, allowed=None, **params) -> SamplerInput:
    """A greedy request but for these parameters, with a prompt."""
    return SamplerInput(
        dataclasses.replace(greedy(100), **params), output, len(output), (0,), PROMPT, allowed
    )


@pytest.mark.parametrize("seed", range(20))
def test_repetition_penalty_is_that_of_transformers(seed):
    values = logits(1, seed)
    processor = RepetitionPenaltyLogitsProcessor(1.7)
    expected = processor(torch.tensor([[*PROMPT, *OUTPUT]]), values.clone()).argmax()
    assert sample(values, [penalised(repetition_penalty=1.7)]) == [int(expected)]


def test_the_prompt_counts_for_repetition_alone():
    values = torch.zeros(1, VOCAB)
    values[0, 3] = 1.0
    assert sample(values, [penalised((), frequency_penalty=2.0, presence_penalty=2.0)]) == [3]
    values[0, 5] = 0.9
    assert sample(values, [penalised((), repetition_penalty=2.0)]) == [5]


def test_choices_of_one_request_differ_and_each_is_its_own():
    values = logits(1, 2)
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
        sample(values, [SamplerInput(penalised(temperature=2.0).params, (), position, (0,), (), allowed)])[0]
        for position in range(50)
    }
    assert tokens == {4, 6}
    assert sample(values, [penalised(allowed=allowed)]) == [4]


def test_min_tokens_gives_way_where_the_form_leaves_only_the_end():
    end = np.zeros(VOCAB, dtype=bool)
    end[0] = True
    values = logits(1, 3)
    early = penalised((), allowed=end, min_tokens=5, stop_token_ids=frozenset({0}), ignore_eos=False)
    assert sample(values, [early]) == [0]
    end[8] = True
    values[0, 0] = 100.0
    assert sample(values, [early]) == [8]

"""All rows of a batch at once: each as a plain reference has it, whatever the rows beside it."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from support.engine.engine_requests import greedy
from support.graphs import Operators, Waits
from triptych.models.base import GenerationDefaults
from triptych.models.families.logits_rules import Timestamps, checkpoint_rules
from triptych.pd_worker.runner.sampler import SamplerInput, raw_logprobs, read_logprobs, sample, uniform

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 100},
    {"temperature": 0.9, "top_k": 3000, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 3.0, "top_p": 0.99},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.5, "min_p": 0.05, "top_p": 0.9, "top_k": 50},
    {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"logit_bias": ((3, 2.0), (5, -4.0)), "frequency_penalty": 0.5},
    {"temperature": 0.8, "min_tokens": 9, "stop_token_ids": frozenset({2})},
    {"temperature": 1.0, "bad_word_ids": ((4,), (8, 9))},
)


def request(seed: int, allowed: np.ndarray | None = None, **fields: Any) -> SamplerInput:
    rng = random.Random(seed)
    output = [rng.randrange(40) for _ in range(rng.randrange(6))]
    params = dataclasses.replace(greedy(100), seed=seed, **fields)
    return SamplerInput(params, output, len(output), (1,), (0, 6, 6, 7), allowed)


def batch(count: int, vocab: int) -> tuple[torch.Tensor, list[SamplerInput]]:
    values = torch.randn(count, vocab, generator=torch.Generator().manual_seed(count)) * 3
    requests = []
    for index in range(count):
        allowed = np.arange(vocab - 2) % 3 > 0 if index % 5 == 4 else None
        requests.append(request(index, allowed, **KINDS[index % len(KINDS)]))
    return values, requests


def weights_of(row: torch.Tensor, asked: SamplerInput) -> torch.Tensor:
    """The probability of every token, one rule after another, in float64."""
    params, row, seen = asked.params, row.double().clone(), Counter(asked.output_ids)
    for token, bias in params.logit_bias:
        row[token] += bias
    for token in {*asked.prompt_ids, *asked.output_ids}:
        factor = params.repetition_penalty
        row[token] = row[token] * factor if row[token] < 0 else row[token] / factor
    for token, count in seen.items():
        row[token] -= count * params.frequency_penalty + params.presence_penalty
    never = [
        ids[-1]
        for ids in params.bad_word_ids
        if asked.output_ids[-1:] == list(ids[:-1])[-1:] or len(ids) == 1
    ]
    never += [*params.stop_token_ids, 1] if len(asked.output_ids) < params.min_tokens else []
    row[never] = -torch.inf
    if asked.allowed is not None:
        row[[t for t in range(len(row)) if t >= len(asked.allowed) or not asked.allowed[t]]] = -torch.inf
    if params.greedy:
        return torch.nn.functional.one_hot(row.argmax(), len(row)).double()
    row /= params.temperature
    weights = row.softmax(-1)
    row[weights < params.min_p * weights.max()] = -torch.inf
    order = row.argsort(descending=True)
    if params.top_k:
        row[order[params.top_k :]] = -torch.inf
    cumulative = row.softmax(-1)[order].cumsum(-1)
    row[order[1:][cumulative[:-1] >= params.top_p]] = -torch.inf
    return row.softmax(-1)


@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("vocab", [60, 5000])
def test_tokens_are_as_likely_as_the_rules_say(kind: int, vocab: int) -> None:
    asked = request(kind, **KINDS[kind])
    values = torch.randn(1, vocab, generator=torch.Generator().manual_seed(kind)) * 4
    draws = 4000
    rows = [dataclasses.replace(asked, position=position) for position in range(draws)]
    tokens = sample(values.expand(draws, -1), rows)
    expected, counts = weights_of(values[0], asked), torch.bincount(tokens, minlength=vocab).double()
    assert not counts[expected == 0].any(), "a token that the rules cut never comes"
    large = expected * draws >= 10
    deviation = (counts - expected * draws)[large] / (expected * draws)[large].sqrt()
    # Of some hundred numbers none is five standard deviations away.
    assert float(deviation.abs().max()) < 5


@pytest.mark.parametrize("vocab", [60, 5000])
def test_a_row_has_the_same_token_alone_and_among_others(vocab: int) -> None:
    values, requests = batch(52, vocab)
    together = sample(values, requests).tolist()
    assert together == [int(sample(values[i : i + 1], requests[i : i + 1])) for i in range(52)]
    order = random.Random(1).sample(range(52), 30)
    assert sample(values[order], [requests[i] for i in order]).tolist() == [together[i] for i in order]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_give_one_row_the_same_token_in_every_batch(dtype: torch.dtype) -> None:
    values = (torch.randn(40, 3000, generator=torch.Generator().manual_seed(0)) * 2).to(dtype).round()
    requests = [request(i, temperature=1.0, top_k=1 + 7 * i, top_p=0.9) for i in range(40)]
    alone = [int(sample(values[i : i + 1], requests[i : i + 1])) for i in range(40)]
    assert sample(values, requests).tolist() == alone


def test_greedy_rows_beside_sampled_ones_are_the_argmax_to_the_bit() -> None:
    values, requests = batch(26, 500)
    values[0, [7, 19]] = values[0].max() + 1
    values[13, 400] = values[13].max().nextafter(torch.tensor(torch.inf))
    tokens = sample(values, requests)
    assert tokens[0] == values[0].argmax() and tokens[13] == values[13].argmax() == 400


SAID = {"suppress_tokens": [3, -1, 99], "begin_suppress_tokens": [7], "no_repeat_ngram_size": 2}
RULES = checkpoint_rules(GenerationDefaults(eos_token_ids=(1,), extra=SAID), {})


def test_a_row_with_rules_beside_others_has_the_token_that_its_rules_leave() -> None:
    values, requests = batch(52, 60)
    ruled = [dataclasses.replace(r, rules=RULES[i % 3 :], prompt=(0, 6)) for i, r in enumerate(requests)]
    together = sample(values, ruled)
    for row, asked in zip(values, ruled, strict=True):
        for rule in asked.rules:
            rule.apply(row, asked.prompt, asked.output_ids)
    assert together.equal(sample(values, requests))


def test_whispers_rules_do_not_wait_for_the_device() -> None:
    values, requests = batch(3, 60)
    with Waits() as waits:
        sample(values, [dataclasses.replace(each, rules=(*RULES, Timestamps(30, 1))) for each in requests])
    assert waits.names == []


@pytest.mark.parametrize("rules", [(), RULES])
def test_more_rows_are_not_more_operators(rules: Any) -> None:
    counts = []
    for rows in (65, 650):
        values, requests = batch(rows, 200)
        requests = [dataclasses.replace(each, rules=rules) for each in requests]
        with Operators() as operators:  # type: ignore[no-untyped-call]
            sample(values, requests)
            raw_logprobs(values, torch.zeros(rows, dtype=torch.int64))
        counts.append(operators.count)
    assert counts[0] == counts[1]


def test_logprobs_are_those_of_the_logits_whatever_was_sampled() -> None:
    values = torch.randn(3, 50, generator=torch.Generator().manual_seed(3)).bfloat16()
    expected = values.float().log_softmax(-1)
    numbers = raw_logprobs(values, torch.tensor([4, -1, 9])).tolist()
    for row, token, count in ((0, 4, 3), (2, 9, 0)):
        given = read_logprobs(numbers[row], token, count)
        assert given.chosen == (token, float(expected[row, token]))
        top = expected[row].sort(descending=True, stable=True)
        assert [value for _, value in given.top] == top.values[:count].tolist()
        assert all(float(expected[row, id]) == value for id, value in given.top)


def test_random_numbers_are_even_and_differ_by_seed_choice_and_position() -> None:
    numbers = [uniform(s, p, c) for s in (0, 1, -1, 2**64 - 2) for p in range(500) for c in range(2)]
    assert len(set(numbers)) == len(numbers)
    assert np.histogram(numbers, bins=8, range=(0, 1))[0] == pytest.approx(500, abs=110)
    assert np.mean(numbers) == pytest.approx(0.5, abs=0.02)

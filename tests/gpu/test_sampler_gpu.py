"""The sampler on a CUDA device: the tokens of a CPU, without waiting for the device."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from support.engine.engine_requests import greedy
from triptych.pd_worker.runner.sampler import SamplerInput, raw_logprobs, sample

pytestmark = pytest.mark.gpu

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    {"logit_bias": ((3, 2.0), (5, -4.0))},
    {"temperature": 0.8, "min_tokens": 9},
)


def requests(count: int, vocab: int) -> list[SamplerInput]:
    allowed = np.arange(vocab - 3) % 2 > 0
    made = []
    for index in range(count):
        params = dataclasses.replace(greedy(100), seed=index, **KINDS[index % len(KINDS)])
        mask = allowed if index % 3 == 0 else None
        made.append(SamplerInput(params, (7, 7, 9), index, (1,), (4, 5), mask))
    return made


@pytest.mark.parametrize("vocab", [500, 32000])
def test_tokens_are_those_of_a_cpu(vocab: int) -> None:
    asked, generator = requests(256, vocab), torch.Generator().manual_seed(0)
    values = torch.randn(256, vocab, generator=generator) * 4
    expected = sample(values, asked)
    tokens = sample(values.cuda(), asked).cpu()
    # A sum in another order can move the bound between two tokens past the random number.
    assert (tokens == expected).sum() >= 254
    greedy_rows = [index for index, row in enumerate(asked) if row.params.greedy]
    assert torch.equal(tokens[greedy_rows], expected[greedy_rows])
    ours, theirs = (raw_logprobs(part, expected.to(part.device)).cpu() for part in (values.cuda(), values))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_nothing_waits_for_the_device() -> None:
    asked = requests(64, 4000)
    values = torch.randn(64, 4000, device="cuda").bfloat16()
    sample(values, asked)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = sample(values, asked)
        raw_logprobs(values, tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tokens.shape == (64,)

"""Fits of synthetic samples whose costs are known."""

from __future__ import annotations

import numpy as np
import pytest

from triptych.base.errors import ConfigError
from triptych.simulator.profile.fit import HELD_OUT, TERMS, Sample, fit_costs, nnls

TRUE = {
    "step": 2e-3,
    "prefill_token": 9e-6,
    "decode_seq": 5e-5,
    "context_token": 2e-7,
    "prefill_context": 2.5e-8,
}


def step_samples(noise: float, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for prefill in (0, 16, 64, 256, 512):
        for decodes in (0, 1, 4, 16):
            for context in (32, 512):
                terms = {
                    "step": 1.0,
                    "prefill_token": float(prefill),
                    "decode_seq": float(decodes),
                    "context_token": float(decodes * context),
                    "prefill_context": prefill * (context + prefill / 2),
                }
                seconds = sum(TRUE[name] * value for name, value in terms.items())
                samples.append(Sample(terms, seconds * float(1 + noise * rng.standard_normal())))
    return samples


def test_exact_samples_give_exact_costs() -> None:
    fit = fit_costs(step_samples(0.0), TERMS["step"])
    assert fit.costs == pytest.approx(TRUE, rel=1e-6)
    assert fit.median_error < 1e-6 and fit.p90_error < 1e-6


def test_noisy_samples_give_costs_within_the_noise() -> None:
    fit = fit_costs(step_samples(0.05), TERMS["step"])
    assert fit.costs == pytest.approx(TRUE, rel=0.2)
    assert 0.005 < fit.median_error < 0.06 and fit.median_error < fit.p90_error < 0.15


def test_the_error_is_that_of_samples_that_the_fit_has_not_seen() -> None:
    samples = sorted(step_samples(0.0), key=lambda sample: sample.seconds)
    spoilt = [
        Sample(sample.terms, sample.seconds * 2) if index % HELD_OUT == HELD_OUT // 2 else sample
        for index, sample in enumerate(samples)
    ]
    # Twice as slow moves them in the order: they are told by their place in it.
    fit = fit_costs(samples, TERMS["step"])
    assert fit.held_out == len(samples[HELD_OUT // 2 :: HELD_OUT])
    assert fit_costs(spoilt, TERMS["step"]).median_error > 0.05


def test_a_term_that_would_turn_negative_is_nothing() -> None:
    samples = [Sample({"a": 1.0, "b": float(n)}, 10.0 - n) for n in range(1, 9)]
    fit = fit_costs(samples, ("a", "b"))
    assert fit.costs["b"] == 0 and 0 < fit.costs["a"] < 10


def test_too_few_samples_are_all_fitted() -> None:
    samples = [Sample({"a": 1.0, "b": float(n)}, 1.0 + n) for n in range(3)]
    fit = fit_costs(samples, ("a", "b"))
    assert fit.held_out == 0 and fit.costs == pytest.approx({"a": 1.0, "b": 1.0})


@pytest.mark.parametrize("samples", [[], [Sample({"a": 1.0}, 0.0)]])
def test_samples_without_time_are_refused(samples: list[Sample]) -> None:
    with pytest.raises(ConfigError, match="measure again"):
        fit_costs(samples, ("a",))


@pytest.mark.parametrize("seed", range(20))
def test_the_solution_meets_the_conditions_of_an_optimum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(20, 6)), rng.normal(size=20)
    x = nnls(matrix, target)
    gradient = matrix.T @ (target - matrix @ x)
    assert (x >= 0).all()
    assert (gradient < 1e-8).all(), "growing a term would help"
    assert abs(gradient * x).max() < 1e-8, "a free term is not at its best"


def test_linearly_dependent_columns_are_fitted() -> None:
    matrix = np.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    assert nnls(matrix, np.array([2.0, 4.0, 6.0])).sum() == pytest.approx(2.0)


def test_terms_are_the_fields_of_the_costs() -> None:
    from dataclasses import fields

    from triptych.simulator.costs.costs import EncoderCosts, PDCosts, ProxyCosts

    def of(*kinds: type) -> set[str]:
        return {field.name for kind in kinds for field in fields(kind)}

    named = {stage: set(terms) for stage, terms in TERMS.items()}
    assert named["prepare"] | named["tower"] | named["save"] == of(EncoderCosts)
    assert named["step"] | named["load"] | named["intake"] == of(PDCosts)
    assert named["proxy"] | {"prompt_token"} == of(ProxyCosts)

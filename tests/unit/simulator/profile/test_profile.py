"""Fits of synthetic samples whose costs are known, and what `triptych profile` says of its machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from triptych.base.errors import ConfigError
from triptych_bench.goodput.report.machine import Machine
from triptych_bench.simulator.costs.costs import QWEN3_VL_4B_SHAPE, published
from triptych_bench.simulator.profile.fit import TERMS, Sample, fit_costs
from triptych_bench.simulator.profile.profile import Profile, report

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


def test_a_term_that_would_turn_negative_is_nothing() -> None:
    samples = [Sample({"a": 1.0, "b": float(n)}, 10.0 - n) for n in range(1, 9)]
    fit = fit_costs(samples, ("a", "b"))
    assert fit.costs["b"] == 0 and 0 < fit.costs["a"] < 10


@pytest.mark.parametrize("samples", [[], [Sample({"a": 1.0}, 0.0)]])
def test_samples_without_time_are_refused(samples: list[Sample]) -> None:
    with pytest.raises(ConfigError, match="measure again"):
        fit_costs(samples, ("a",))


MACHINE = Machine("abc", {}, "a chip", 2, 8.0, "Linux", "triptych profile", 0.1, 1.5)
FOUND = Profile(published("a100-80g"), QWEN3_VL_4B_SHAPE, {}, MACHINE, {}, {})


def test_an_idle_machine_gets_no_warning() -> None:
    assert "measure again" not in report(FOUND)


def test_a_loaded_machine_gets_a_warning() -> None:
    loaded = replace(FOUND, machine=replace(MACHINE, load_before=1.9))
    assert "LOADED MACHINE (1.9 on 2 cores)" in report(loaded)

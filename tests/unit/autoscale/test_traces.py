"""The traces that scalers are compared on."""

from __future__ import annotations

import pytest

from benchmarks.autoscale.comparison import trial_setup
from benchmarks.autoscale.traces import TRACES, requests_of

SETUP = trial_setup()


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_is_the_same_for_the_same_seed_and_in_order(name: str) -> None:
    first, second = (requests_of(TRACES[name](), SETUP.costs.encoder, SETUP.model, 3) for _ in range(2))
    assert first == second and first[1] == sorted(first[1]) and len(first[0]) == len(first[1])
    assert requests_of(TRACES[name](), SETUP.costs.encoder, SETUP.model, 4)[1] != first[1]

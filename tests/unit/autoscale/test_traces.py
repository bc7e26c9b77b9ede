"""The traces that scalers are compared on."""

from __future__ import annotations

import pytest

from benchmarks.autoscale.comparison import trial_setup
from benchmarks.autoscale.traces import (
    PEAK_WORKERS,
    TRACES,
    UTILIZATION,
    Phase,
    Trace,
    requests_of,
    work_of,
)

SETUP = trial_setup()


@pytest.mark.parametrize("name", TRACES)
def test_the_peak_is_at_least_four_times_the_mean(name: str) -> None:
    assert TRACES[name]().peak_to_mean >= 4


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_is_the_same_for_the_same_seed_and_in_order(name: str) -> None:
    first, second = (requests_of(TRACES[name](), SETUP.costs.encoder, SETUP.model, 3) for _ in range(2))
    assert first == second and first[1] == sorted(first[1]) and len(first[0]) == len(first[1])
    assert requests_of(TRACES[name](), SETUP.costs.encoder, SETUP.model, 4)[1] != first[1]


@pytest.mark.parametrize("name", TRACES)
def test_the_work_of_a_trace_is_its_share_of_the_peak(name: str) -> None:
    one, costs = TRACES[name](), SETUP.costs.encoder
    load, _ = requests_of(one, costs, SETUP.model)
    shown = dict.fromkeys(picture for planned in load for picture in planned.pictures)
    work = sum(costs.tower(1, SETUP.model.plan(it.width, it.height)[0]) for it in shown)
    expected = PEAK_WORKERS * UTILIZATION * one.seconds / one.peak_to_mean
    assert work == pytest.approx(expected, rel=0.1)


def test_pictures_are_shown_again() -> None:
    load, _ = requests_of(TRACES["burst"](), SETUP.costs.encoder, SETUP.model)
    shown = [picture for planned in load for picture in planned.pictures]
    assert len(set(shown)) < 0.8 * len(shown)


def test_rates_follow_the_phases() -> None:
    workload = TRACES["burst"]().phases[0].workload
    steps = Trace(
        "x", (Phase(400, 0.2, 0.2, workload), Phase(100, 0.0, 0.0, workload), Phase(400, 0.0, 1.0, workload))
    )
    _, times = requests_of(steps, SETUP.costs.encoder, SETUP.model)
    rate = PEAK_WORKERS * UTILIZATION / work_of(workload, SETUP.costs.encoder, SETUP.model)
    assert sum(at < 400 for at in times) == pytest.approx(0.2 * 400 * rate, rel=0.2)
    assert not any(400 <= at < 500 for at in times)
    assert sum(at >= 700 for at in times) == pytest.approx(0.75 * 200 * rate, rel=0.2)
    assert steps.share(600) == pytest.approx(0.25) and steps.share(1000) == 0.0

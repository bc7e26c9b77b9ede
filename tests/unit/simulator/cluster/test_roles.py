"""Prefill and decode workers in virtual time: hand-overs, what they cost, and what they spare."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from support.simulated import COSTS, LIMITS, MIX, MODEL, run
from triptych.base.errors import ConfigError
from triptych_bench.goodput.load.workload import Workload
from triptych_bench.simulator.cluster.context import Simulation
from triptych_bench.simulator.cluster.shape import on_devices

LONG = Workload(1500, 64)
BOTH, APART = on_devices(0, 2), on_devices(0, 2, prefill=1)


def tail(simulation: Simulation) -> float:
    """P99 of the time of a token."""
    times = sorted((one.e2e - one.ttft) / (one.output_tokens - 1) for one in simulation.records)
    return times[int(0.99 * len(times))]


def ttft(simulation: Simulation) -> float:
    return statistics.median(record.ttft for record in simulation.records)


@pytest.mark.parametrize("shape", [APART, on_devices(1, 3, prefill=1), on_devices(1, 3, prefill=2)])
@pytest.mark.parametrize("load", [LONG, MIX])
def test_every_request_has_all_of_its_tokens_and_nothing_is_left(shape, load) -> None:
    if load is MIX and not shape.encoders:
        shape = on_devices(1, 2, prefill=1)
    simulation = run(shape, load, rate=9.0, count=200)
    assert not any(record.error for record in simulation.records)
    assert all(record.output_tokens == record.asked_tokens for record in simulation.records)
    assert not any(simulation.leftovers.values()), simulation.leftovers
    assert simulation.counters.handed_over > 0


def test_tokens_come_evenly_and_the_first_one_later() -> None:
    both, apart = run(BOTH, LONG, count=300), run(APART, LONG, count=300)
    assert apart.counters.handed_over == 300 and not both.counters.handed_over
    assert tail(apart) < 0.7 * tail(both)
    assert ttft(apart) > ttft(both)


def test_short_prompts_stay_whole_at_decode_workers() -> None:
    short = run(APART, replace(LONG, text_tokens=LIMITS.proxy.prefill_threshold // 2), count=50)
    assert short.counters.handed_over == 0
    assert short.counters.utilisation["prefill"] == 0


def test_a_decode_worker_computes_no_prompt_that_it_was_handed_over_but_the_open_block() -> None:
    """Alone, its steps are those of the tokens, and one of less than a block."""
    [record] = run(APART, LONG, [0.0]).records
    [whole] = run(on_devices(0, 1), LONG, [0.0]).records
    computed = record.e2e - whole.e2e
    prompt = 1500 + MODEL.prompt_overhead_tokens
    assert computed < 0.2 * COSTS.pd.step_seconds(prompt, 0, 0, 0.0)


def test_the_way_of_the_kv_takes_its_time_and_the_stream_goes_on_meanwhile() -> None:
    slow = replace(LIMITS, kv_bandwidth=1500 * MODEL.kv_token_bytes / 0.3)
    quick = replace(LIMITS, kv_bandwidth=1e12)
    [late] = run(APART, LONG, [0.0], limits=slow).records
    [soon] = run(APART, LONG, [0.0], limits=quick).records
    assert late.ttft == pytest.approx(soon.ttft)
    assert max(late.itls) < 0.1, "the prefill worker decodes until the other one has a token"


def test_a_shape_without_a_decode_worker_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave one to decode"):
        on_devices(1, 2, prefill=2)

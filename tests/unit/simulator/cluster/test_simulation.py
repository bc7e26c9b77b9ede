"""What holds for every simulation, whatever its costs."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest

from support.simulated import COSTS, LIMITS, MIX, MODEL, PICTURE, TEXT, run
from triptych.base.config import MIB, EncoderConfig, ProxyConfig
from triptych.base.errors import ConfigError
from triptych.goodput.load.workload import Arrivals, Workload, arrival_times, plan_requests
from triptych.goodput.measure.figures import judge
from triptych.goodput.measure.search import SearchLimits, search
from triptych.goodput.measure.slo import Slo
from triptych.simulator.cluster.context import Simulation
from triptych.simulator.cluster.shape import ClusterShape, colocated, on_devices
from triptych.simulator.run import simulate

SHAPES = (
    on_devices(1, 1),
    on_devices(2, 3),
    colocated(1),
    colocated(2),
)
#: 40 blocks a PD worker: about five requests of the mix.
TIGHT = replace(LIMITS, pd=replace(LIMITS.pd, kv_memory=40 * 16 * MODEL.kv_token_bytes))


def nothing_left(found: Simulation) -> bool:
    return not any(found.leftovers.values())


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_request_ends_as_asked_and_nothing_is_held_after_it(shape: ClusterShape) -> None:
    found = run(shape, MIX, rate=6, count=60)
    assert all(record.ok and record.output_tokens == record.asked_tokens for record in found.records)
    assert nothing_left(found), found.leftovers
    assert all(
        0 <= share <= 1 + 1e-9 for name, share in found.counters.utilisation.items() if name != "proxy"
    )


def test_equal_arguments_give_equal_results_and_another_seed_others() -> None:
    first, second = (run(on_devices(2, 2), MIX, rate=20, seed=3) for _ in range(2))
    assert first == second
    assert run(on_devices(2, 2), MIX, rate=20, seed=4).records != first.records


def test_requests_give_way_where_blocks_are_short_and_end_all_the_same() -> None:
    found = run(on_devices(1, 1), replace(TEXT, output_tokens=120), rate=20, count=40, limits=TIGHT)
    assert found.counters.preemptions > 0
    assert all(record.ok for record in found.records) and nothing_left(found)


def test_beyond_the_queue_requests_are_answered_with_429() -> None:
    limits = replace(LIMITS, proxy=ProxyConfig(max_queue=8))
    found = run(on_devices(1, 1), TEXT, rate=500, count=80, limits=limits)
    refused = [record for record in found.records if not record.ok]
    assert found.counters.refused == len(refused) > 20
    assert all(record.error.startswith("HTTP 429") for record in refused)
    assert nothing_left(found)


def test_a_cluster_that_cannot_keep_up_runs_into_the_clients_patience() -> None:
    limits = replace(LIMITS, client_timeout=2.0)
    found = run(on_devices(1, 1), PICTURE, rate=400, count=200, limits=limits)
    late = [record for record in found.records if not record.ok]
    assert late and {record.error for record in late} == {"timeout after 2 s"}
    assert all(record.e2e == pytest.approx(2.0) for record in late)
    assert any(record.ok for record in found.records)
    assert nothing_left(found), found.leftovers


def test_the_proxys_own_deadline_is_a_504() -> None:
    limits = replace(LIMITS, proxy=ProxyConfig(max_queue=10_000, request_timeout=1.0))
    found = run(on_devices(1, 1), PICTURE, rate=400, count=150, limits=limits)
    errors = {record.error[:8] for record in found.records if not record.ok}
    assert errors == {"HTTP 504"} and nothing_left(found)


def test_what_can_never_run_is_a_400() -> None:
    found = run(on_devices(1, 1), replace(TEXT, text_tokens=50_000), [0.0])
    assert found.records[0].error.startswith("HTTP 400") and nothing_left(found)


def test_embeddings_that_the_store_loses_are_encoded_again() -> None:
    """A store of three pictures, and PD workers with room for more."""
    limits = replace(LIMITS, store_memory=3 * 100 * MODEL.row_bytes, proxy=ProxyConfig(flow_control=False))
    slow = replace(COSTS, pd=replace(COSTS.pd, load_item=0.05))
    load = Workload(20, 8, ((3, 1.0),), ((320, 320, 1.0),))
    found = run(on_devices(2, 1), load, rate=30, count=40, limits=limits, costs=slow)
    assert found.counters.store_evictions > 0 and found.counters.re_encodes > 0
    assert all(record.ok or record.error.startswith("HTTP ") for record in found.records)
    assert nothing_left(found), found.leftovers


def test_pixels_beyond_the_memory_are_prepared_again() -> None:
    limits = replace(LIMITS, encoder=EncoderConfig(device="cuda", prepared_memory=2 * MIB, tower_credit=2))
    found = run(on_devices(1, 1), replace(PICTURE, images=((4, 1.0),)), rate=50, count=20, limits=limits)
    assert all(record.ok for record in found.records) and nothing_left(found)


def test_passing_tokens_on_is_counted_as_the_proxys_cpu_time() -> None:
    dear = replace(COSTS, proxy=replace(COSTS.proxy, token=0.004))
    cheap, costly = (run(on_devices(1, 1), TEXT, rate=2, count=20, costs=each) for each in (COSTS, dear))
    assert costly.counters.utilisation["proxy"] > cheap.counters.utilisation["proxy"]


def test_the_rate_search_takes_simulated_windows_as_it_takes_measured_ones() -> None:
    slo, brief = Slo((("ttft", 300.0),)), replace(TEXT, output_tokens=2)
    slow = replace(COSTS, pd=replace(COSTS.pd, prefill_token=4e-4))

    def sustained(shape: ClusterShape) -> float:
        def measure(rate: float):  # type: ignore[no-untyped-def]
            return judge(run(shape, brief, rate=rate, count=40, costs=slow).records, slo)

        return search(measure, SearchLimits(16.0, windows=1, confirmations=0, resolution=0.25)).rate

    assert sustained(on_devices(1, 2)) > 1.3 * sustained(on_devices(1, 1)) > 0


def test_a_fixed_number_of_clients_keeps_as_many_in_flight() -> None:
    load = plan_requests(TEXT, 30, 0)
    found = simulate(load, [], on_devices(1, 1), COSTS, MODEL, LIMITS, concurrency=3)
    assert [record.sent for record in found.records[:4]].count(0.0) == 3
    assert all(record.ok and math.isfinite(record.e2e) for record in found.records)
    moments = sorted(
        (at, step) for r in found.records for at, step in ((r.sent, 1), (r.sent + r.e2e - 1e-9, -1))
    )
    in_flight = [sum(step for _, step in moments[: index + 1]) for index in range(len(moments))]
    assert max(in_flight) <= 3


def test_warm_up_is_marked_and_the_load_is_that_of_the_load_generator() -> None:
    planned = plan_requests(MIX, 30, 1)
    times = arrival_times(Arrivals(rate=5), 30, 1)
    records = simulate(planned, times, on_devices(1, 1), COSTS, MODEL, LIMITS, warm_up=10).records
    assert [record.warm_up for record in records] == [True] * 10 + [False] * 20
    assert [record.planned for record in records] == times
    assert [record.images for record in records] == [len(request.pictures) for request in planned]
    assert [record.asked_tokens for record in records] == [request.output_tokens for request in planned]


@pytest.mark.parametrize(
    ("times", "shape", "words"),
    [
        ([0.0], on_devices(1, 1), "2 requests have 1 times"),
        ([0.0, 1.0], on_devices(0, 1), "has no encoder"),
    ],
)
def test_what_cannot_be_simulated_is_named(times: list[float], shape: ClusterShape, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        simulate(plan_requests(PICTURE, 2, 0), times, shape, COSTS, MODEL)


def test_a_shape_names_its_missing_pd_worker() -> None:
    with pytest.raises(ConfigError, match="no PD worker"):
        on_devices(1, 0)


def test_the_simulator_needs_no_torch() -> None:
    code = "import sys, triptych.simulator.run; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)

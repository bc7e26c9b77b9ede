"""What holds for every simulation, whatever its costs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from support.simulated import COSTS, LIMITS, MIX, MODEL, PICTURE, TEXT, run
from triptych.base.config import ProxyConfig
from triptych.base.errors import ConfigError
from triptych.goodput.load.workload import Workload, plan_requests
from triptych.simulator.cluster.context import Simulation
from triptych.simulator.cluster.shape import ClusterShape, colocated, on_devices
from triptych.simulator.run import simulate

SHAPES = (on_devices(1, 1), on_devices(2, 3), colocated(1), colocated(2))


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


def test_beyond_the_queue_requests_are_answered_with_429() -> None:
    limits = replace(LIMITS, proxy=ProxyConfig(max_queue=8))
    found = run(on_devices(1, 1), TEXT, rate=500, count=80, limits=limits)
    refused = [record for record in found.records if not record.ok]
    assert found.counters.refused == len(refused) > 20
    assert all(record.error.startswith("HTTP 429") for record in refused)
    assert nothing_left(found)


def test_embeddings_that_the_store_loses_are_encoded_again() -> None:
    """A store of three pictures, and PD workers with room for more."""
    limits = replace(LIMITS, store_memory=3 * 100 * MODEL.row_bytes, proxy=ProxyConfig(flow_control=False))
    slow = replace(COSTS, pd=replace(COSTS.pd, load_item=0.05))
    load = Workload(20, 8, ((3, 1.0),), ((320, 320, 1.0),))
    found = run(on_devices(2, 1), load, rate=30, count=40, limits=limits, costs=slow)
    assert found.counters.store_evictions > 0 and found.counters.re_encodes > 0
    assert all(record.ok or record.error.startswith("HTTP ") for record in found.records)
    assert nothing_left(found), found.leftovers


@pytest.mark.parametrize(
    ("times", "shape", "words"),
    [([0.0], on_devices(1, 1), "2 requests have 1 times"), ([0.0, 1.0], on_devices(0, 1), "has no encoder")],
)
def test_what_cannot_be_simulated_is_named(times: list[float], shape: ClusterShape, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        simulate(plan_requests(PICTURE, 2, 0), times, shape, COSTS, MODEL)


def test_the_simulator_needs_no_torch() -> None:
    code = "import sys, triptych.simulator.run; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)

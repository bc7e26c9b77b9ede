"""Replicas that encode inside the step, encoders with costs of their own, and routing by picture."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.simulated import COSTS, LIMITS, run
from triptych.goodput.load.workload import Picture, PlannedRequest
from triptych.simulator.cluster.shape import ClusterShape, WorkerRole, colocated, in_step, on_devices

PATCHES = 400
TOWER = COSTS.encoder.tower(1, PATCHES)


def request(seed: int, output_tokens: int = 1, picture: int | None = None) -> PlannedRequest:
    shown = (Picture(picture, 320, 320),) if picture is not None else ()
    return PlannedRequest(seed, 50, output_tokens, shown)


def test_a_step_that_reaches_a_picture_lasts_as_long_as_its_tower_besides() -> None:
    free = replace(COSTS, encoder=replace(COSTS.encoder, tower_batch=0, tower_item=0, tower_patch=0))
    with_tower, without = (
        run(in_step(1), [request(1, picture=1)], [0.0], costs=costs).records[0].ttft
        for costs in (COSTS, free)
    )
    assert with_tower - without == pytest.approx(TOWER)


def test_a_sequence_that_decodes_waits_for_the_tower_in_its_step() -> None:
    requests = [request(1, output_tokens=60), request(2, picture=2)]
    decoding = run(in_step(1), requests, [0.0, 0.1]).records[0]
    apart = run(on_devices(1, 1), requests, [0.0, 0.1]).records[0]
    assert max(decoding.itls) - max(apart.itls) > 0.9 * TOWER


def test_a_picture_is_encoded_once_by_each_replica_that_sees_it() -> None:
    again = [request(seed, picture=1) for seed in (1, 2)]
    # Else the second request finds the picture's keys and values.
    limits = replace(LIMITS, pd=replace(LIMITS.pd, prefix_caching=False))
    # One at a time on one replica; at once, so that each of two replicas takes one.
    first, second = run(in_step(1), again, [0.0, 1.0], limits=limits).records
    assert first.ttft - second.ttft > TOWER
    both = run(in_step(2), again, [0.0, 0.0], limits=limits).records
    assert min(record.ttft for record in both) - second.ttft > TOWER


def test_an_encoder_with_its_own_costs_takes_its_own_time() -> None:
    slow = replace(COSTS.encoder, tower_item=COSTS.encoder.tower_item + 0.5)
    shape = ClusterShape("slow", (WorkerRole(encodes=True, encoder=slow), WorkerRole(decodes=True)))
    usual, late = (run(one, [request(1, picture=1)], [0.0]).records[0] for one in (on_devices(1, 1), shape))
    assert late.ttft - usual.ttft == pytest.approx(0.5)


def test_with_affinity_requests_on_a_picture_go_to_the_replica_that_has_it() -> None:
    load = [request(seed, picture=seed % 4) for seed in range(40)]
    times = [0.5 * index for index in range(40)]
    late = {}
    for affinity in (False, True):
        found = run(in_step(4), load, times, limits=replace(LIMITS, affinity=affinity))
        late[affinity] = sum(record.ttft > 0.9 * TOWER + COSTS.pd.step for record in found.records)
    assert late[True] == 4
    assert late[False] > 8


@pytest.mark.parametrize("shape", [in_step(3), colocated(3)])
def test_nothing_is_left_of_replicas_of_either_kind(shape: ClusterShape) -> None:
    load = [request(seed, 5, picture=seed % 7) for seed in range(60)]
    found = run(shape, load, [0.01 * index for index in range(60)])
    assert all(record.ok for record in found.records) and not any(found.leftovers.values())

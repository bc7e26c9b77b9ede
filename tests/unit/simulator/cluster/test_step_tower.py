"""Replicas that encode inside the step, encoders with costs of their own, and routing by picture."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.simulated import COSTS, run
from triptych.goodput.load.workload import Picture, PlannedRequest
from triptych.simulator.cluster.shape import ClusterShape, colocated, in_step

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


@pytest.mark.parametrize("shape", [in_step(3), colocated(3)])
def test_nothing_is_left_of_replicas_of_either_kind(shape: ClusterShape) -> None:
    load = [request(seed, 5, picture=seed % 7) for seed in range(60)]
    found = run(shape, load, [0.01 * index for index in range(60)])
    assert all(record.ok for record in found.records) and not any(found.leftovers.values())

"""Loads: how often pictures come again, and that rounds share none."""

from __future__ import annotations

import pytest

from benchmarks.against_peer.loads import seed_of
from benchmarks.vllm_fleet.page import LOADS, SHARED, WORKLOADS
from triptych.goodput.load.workload import plan_requests


@pytest.mark.parametrize(
    ("name", "pictures", "least", "most"),
    [
        ("image-0", 1, 1.0, 1.0),
        ("image-50", 1, 0.4, 0.6),
        ("images-4-50", 4, 0.4, 0.6),
        ("image-90", 1, 0.04, 0.2),
    ],
)
def test_a_load_shows_new_pictures_as_often_as_its_name_says(
    name: str, pictures: int, least: float, most: float
) -> None:
    planned = plan_requests(WORKLOADS[name], 200, seed=7)
    shown = [picture for request in planned for picture in request.pictures]
    assert len(shown) == 200 * pictures
    assert least <= len(set(shown)) / len(shown) <= most
    assert {request.output_tokens for request in planned} == {64}


def test_no_two_rounds_share_requests() -> None:
    seeds = {seed_of(model, load, n) for model in ("tiny", "small") for load in LOADS for n in range(20)}
    assert len(seeds) == 2 * len(LOADS) * 20


def test_the_replicas_loads_are_loads() -> None:
    assert set(SHARED) <= set(WORKLOADS)

"""Traces, TTLs by cost, and what a replay counts."""

from __future__ import annotations

import pytest

from benchmarks.store_eviction.replay import Policy, reencoded
from benchmarks.store_eviction.trace import MIXES, Item, Shape, Trace

SMALL = {"items": 200, "requests": 2000}


@pytest.mark.parametrize("mix", MIXES)
def test_one_seed_is_one_trace(mix: str) -> None:
    shape = Shape(mix, fresh=0.2, period=20.0, **SMALL)
    first, second = Trace(shape, 7), Trace(shape, 7)
    assert list(first.requests()) == list(second.requests())
    assert first.items == second.items
    assert len(first.items) > shape.items, "new items come"


def test_a_ttl_grows_with_the_seconds_per_byte_within_bounds() -> None:
    ttl_of = Policy("volatile-ttl", 100.0).ttl_of(1e-6)
    assert ttl_of(Item(1000, 2e-3)) == pytest.approx(200.0)
    assert ttl_of(Item(1000, 1.0)) == 1600.0
    assert ttl_of(Item(1000, 0.0)) == 6.25
    assert Policy("volatile-lru").ttl_of(1e-6)(Item(1000, 1.0)) == 3600.0


def test_with_room_for_all_nothing_is_encoded_again() -> None:
    assert reencoded(Shape(MIXES[0], **SMALL), 1.1, Policy("volatile-lru"), 1) == 0.0


def test_less_memory_is_more_encoding_again() -> None:
    shape = Shape(MIXES[1], **SMALL)
    costs = [reencoded(shape, part, Policy("volatile-lru"), 1) for part in (0.05, 0.2, 0.6)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] > 0

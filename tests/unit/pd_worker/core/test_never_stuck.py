"""Requests whose items fill the embedding memory to the last byte all end: nobody waits for ever."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine.engine_requests import finished, make_request
from support.engine.tight_engine import ROW_BYTES, TightEngine, serve, tight_requests, wide_feature
from triptych.base.errors import InvalidRequest
from triptych.ec_connector.connectors.memory import MemoryStore

STORE = MemoryStore()
LIMIT = 400


def run(seed: int, rows: int, *, pooled: bool = False, one_by_one: bool = False) -> tuple[bool, TightEngine]:
    """Whether all of the seed's requests end, in a memory of `rows` rows."""
    rng = random.Random(seed)
    engine = TightEngine(
        STORE,
        capacity=rows * ROW_BYTES,
        pooled=pooled,
        one_by_one=one_by_one,
        num_blocks=rng.randint(10, 20),
        max_model_len=40,
        budget=rng.choice([3, 8, 16]),
        max_num_seqs=rng.randint(1, 5),
        prefix_caching=rng.random() < 0.5,
    )
    try:
        return serve(engine, rng, tight_requests(rng, rows, 8), limit=LIMIT), engine
    finally:
        if engine.idle:
            engine.assert_at_rest()
        engine.close()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30), rows=st.integers(6, 14), pooled=st.booleans(), one_by_one=st.booleans())
def test_requests_that_fill_the_memory_to_the_last_byte_all_end(seed, rows, pooled, one_by_one):
    ended, engine = run(seed, rows, pooled=pooled, one_by_one=one_by_one)
    assert ended, "requests wait for ever"
    assert len(finished(engine)) == 8
    assert engine.cache.used <= engine.cache.capacity


def test_a_pool_in_many_pieces_is_used_to_the_last_byte() -> None:
    scattered = 0
    for seed in range(24):
        ended, engine = run(seed, 6 + seed % 9, pooled=True)
        assert ended, f"seed {seed} waits for ever"
        scattered += engine.scattered
    assert scattered, "no item was in more than one piece"


def test_requests_whose_items_come_one_by_one_are_prefilled_meanwhile_and_all_end() -> None:
    early = 0
    for seed in range(24):
        ended, engine = run(seed, 6 + seed % 9, one_by_one=True)
        assert ended, f"seed {seed} waits for ever"
        early += sum(engine.early.values())
    assert early > 40, "hardly anything was prefilled before all items were there"


@pytest.mark.parametrize("rows", [(6,), (3, 3), (1, 2, 3)])
def test_items_whose_sum_is_the_memory_are_served_and_one_byte_less_refuses_them(rows):
    features, offset = [], 0
    for index, count in enumerate(rows):
        features.append(wide_feature(f"item {index}", offset, count))
        offset += count
    total = sum(feature.plan.nbytes for feature in features)
    engine = TightEngine(STORE, capacity=total)
    engine.add(make_request("a", offset + 1, features, ready=()))
    for _ in range(30):
        engine.encode_what_was_asked_for()
        engine.step()
    assert finished(engine)["a"].error is None
    engine.assert_at_rest()
    engine.close()
    smaller = TightEngine(STORE, capacity=total - 1)
    with pytest.raises(InvalidRequest, match="--encoder-cache-memory"):
        smaller.add(make_request("a", offset + 1, features, ready=()))
    smaller.close()

"""Requests of a model with recurrent layers: a slot beside the blocks, prefixes by snapshots of the state.

The engine without a model asserts at each chunk that its slot holds the state behind the token before it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine.engine_requests import (
    STORE,
    Make,
    ModellessEngine,
    finished,
    make_feature,
    make_request,
    shares,
)
from triptych.pd_worker.core.outputs import ScheduledChunk, SchedulerOutput

STATES = {"slots": 4, "snapshots": 4, "budget": 64, "block_size": 4}


def prefills(outputs: Iterable[SchedulerOutput], name: str) -> list[ScheduledChunk]:
    chunks: list[ScheduledChunk] = [chunk for output in outputs for chunk in output.chunks]
    return [c for c in chunks if c.state.request.request_id == name and c.count > 1]


def starts(outputs: Iterable[SchedulerOutput], name: str) -> list[tuple[int, int]]:
    """(first token, tokens) of each prefill chunk of a request."""
    return [(chunk.start, chunk.count) for chunk in prefills(outputs, name)]


def kept(outputs: Iterable[SchedulerOutput], name: str) -> list[int]:
    """Where the state of a request's prompt is kept."""
    return [at for chunk in prefills(outputs, name) for at in chunk.kept_at]


def test_no_request_starts_without_a_slot(make: Make) -> None:
    engine = make(**{**STATES, "slots": 1})
    engine.add(make_request("a", 4, max_tokens=3), make_request("b", [9] * 4, arrival=1.0))
    assert [shares(output) for output in engine.run_out()] == [
        [("a", 0, 4)], [("a", 4, 1)], [("a", 5, 1)], [("b", 0, 4)],
    ]  # fmt: skip


def test_an_equal_prompt_goes_on_from_the_snapshot_at_its_last_full_block(make: Make) -> None:
    engine = make(**STATES)
    engine.add(make_request("a", 30))
    outputs = engine.run_out()
    assert starts(outputs, "a") == [(0, 30)], "a snapshot ends no chunk"
    assert kept(outputs, "a") == [28]
    engine.add(make_request("b", 30, arrival=1.0))
    outputs = engine.run_out()
    assert starts(outputs, "b") == [(28, 2)]
    assert [len(output.states_restored) for output in outputs] == [1]
    assert finished(engine)["b"].cached_tokens == 28


def test_blocks_without_a_snapshot_are_no_prefix(make: Make) -> None:
    engine = make(**{**STATES, "snapshots": 0})
    engine.add(make_request("a", 30))
    assert kept(engine.run_out(), "a") == []
    engine.add(make_request("b", 30, arrival=1.0))
    assert starts(engine.run_out(), "b") == [(0, 30)]


def test_a_chunk_keeps_the_state_wherever_its_prompt_does(make: Make) -> None:
    engine = make(**{**STATES, "capacity": 4096, "budget": 128, "overlap": False})
    items = [make_feature("dog", 9, 20), make_feature("cat", 40, 21)]
    engine.add(make_request("a", 100, items, ready=[]))
    engine.arrive(*items)
    chunk = prefills(engine.run_out(), "a")[-1]
    assert (chunk.start, chunk.count, chunk.kept_at) == (9, 91, [60, 96])
    assert len({index for _, index in chunk.snapshots}) == 2
    assert engine.scheduler.collect_stats().state_snapshots == 2


@pytest.mark.parametrize("budget", [7, 28, 29])
def test_the_state_is_kept_by_the_chunk_that_reaches_it(make: Make, budget: int) -> None:
    engine = make(**{**STATES, "budget": budget})
    engine.add(make_request("a", 30))
    outputs = engine.run_out()
    assert [chunk.end >= 28 > chunk.start for chunk in prefills(outputs, "a")].count(True) == 1
    assert kept(outputs, "a") == [28]
    engine.add(make_request("b", 30, arrival=1.0))
    assert starts(engine.run_out(), "b") == [(28, 2)]


def test_where_a_prompt_parts_from_an_earlier_one_its_state_is_kept_for_the_third(make: Make) -> None:
    engine = make(**STATES)
    common, chunks, states = list(range(22)), [], []
    for number in range(3):
        engine.add(make_request(f"r{number}", [*common, *[100 + number] * 20], arrival=number))
        outputs = engine.run_out()
        chunks.append(starts(outputs, f"r{number}"))
        states.append(kept(outputs, f"r{number}"))
    assert chunks == [[(0, 42)], [(0, 42)], [(20, 22)]]
    assert states == [[40], [20, 40], [40]]


def test_a_snapshot_goes_with_its_block(make: Make) -> None:
    engine = make(**{**STATES, "num_blocks": 16})
    engine.add(make_request("a", 30))
    engine.run_out()
    assert engine.scheduler.collect_stats().state_snapshots == 1
    engine.add(make_request("large", [9] * 60, arrival=1.0))
    engine.run_out()
    engine.add(make_request("b", 30, arrival=2.0))
    assert starts(engine.run_out(), "b") == [(0, 30)]
    assert engine.kv.states.snapshots_used <= 2


def test_a_failed_step_leaves_no_snapshot(make: Make) -> None:
    engine = make(**STATES)
    engine.add(make_request("a", 30))
    engine.step(error=RuntimeError("no memory"))
    engine.add(make_request("b", 30, arrival=1.0))
    assert starts(engine.run_out(), "b") == [(0, 30)]


def test_a_preempted_request_whose_blocks_are_gone_is_computed_again(make: Make) -> None:
    engine = make(**{**STATES, "num_blocks": 14})
    engine.add(
        make_request("a", [1] * 22, max_tokens=24), make_request("b", [2] * 22, max_tokens=9, arrival=1.0)
    )
    outputs = engine.run_out()
    assert [s.request.request_id for o in outputs for s in o.preempted] == ["b"]
    assert starts(outputs, "b") == [(0, 22), (0, 29)]
    assert finished(engine)["b"].completion_tokens == 9


@pytest.mark.parametrize("host_slots", [1, 0])
def test_a_preempted_requests_state_is_swapped_with_its_blocks(make: Make, host_slots: int) -> None:
    engine = make(**{**STATES, "num_blocks": 14, "host_blocks": 20, "host_slots": host_slots})
    engine.add(
        make_request("a", [1] * 22, max_tokens=24), make_request("b", [2] * 22, max_tokens=9, arrival=1.0)
    )
    outputs = engine.run_out()
    assert [len(o.states_out) for o in outputs if o.preempted] == [host_slots], "no host slot: recomputed"
    assert sum(len(o.states_in) for o in outputs) == host_slots
    assert finished(engine)["b"].completion_tokens == 9


def test_a_prompt_is_prefilled_early_where_a_snapshot_keeps_its_state(make: Make) -> None:
    engine, image = make(**STATES), make_feature("cat", 20, 8)
    engine.add(make_request("a", 40, [image], ready=[]))
    early = [engine.step() for _ in range(3)]
    assert starts(early, "a") == [(0, 20)]
    engine.arrive(image)
    assert starts(engine.run_out(), "a") == [(20, 20)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_every_request_ends_with_its_own_state_and_nothing_is_kept(seed: int) -> None:
    """Random traffic over few blocks, slots and snapshots: failed steps and copies, cancels, pauses."""
    rng = random.Random(seed)
    STORE.clear()
    block_size = rng.choice([1, 2, 4])
    engine = ModellessEngine(
        STORE,
        num_blocks=rng.randint(10, 24) * 4 // block_size,
        block_size=block_size,
        budget=rng.choice([3, 8, 32]),
        max_num_seqs=4,
        max_model_len=36,
        slots=rng.randint(1, 4),
        snapshots=rng.randint(0, 3),
        host_blocks=rng.choice([0, 20]),
        host_slots=rng.randint(0, 3),
        prefix_caching=rng.random() < 0.8,
        copy_fails=lambda: rng.random() < 0.2,
    )
    pool = [make_feature(f"i{i}", 6, 5) for i in range(3)]
    requests = []
    for number in range(12):
        features = [rng.choice(pool)] if rng.random() < 0.5 else []
        tokens = [rng.randint(0, 1)] * rng.randint(11, 16) + [number] * rng.randint(0, 9)
        requests.append(
            make_request(
                f"r{number}", tokens, features, max_tokens=rng.randint(1, 9), arrival=number, ready=[]
            )
        )
    for step in range(600):
        if requests and rng.random() < 0.4:
            engine.add(requests.pop())
        if rng.random() < 0.3:
            some = rng.choice(pool)
            engine.arrive(some)
        if rng.random() < 0.05:
            engine.scheduler.cancel([f"r{rng.randrange(12)}"], "proxy")
        engine.step(error=RuntimeError("x") if rng.random() < 0.02 else None)
        if step > 60 and not requests and engine.idle:
            break
    assert len(engine.of("finished")) == 12
    engine.assert_at_rest()

"""Preempted requests go to host memory and come back, without a model: nothing is computed twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine.engine_requests import (
    STORE,
    WIDTH,
    Make,
    ModellessEngine,
    make_cross,
    make_feature,
    make_request,
    publish,
)
from triptych.base.types import FinishReason, MMFeature
from triptych.pd_worker.core.kv_cache.kv_cache_manager import SwapManager
from triptych.pd_worker.core.outputs import SchedulerOutput


@pytest.fixture
def engine_of(make: Make) -> Make:
    return partial(make, prefix_caching=False)


def stored(feature: MMFeature) -> MMFeature:
    publish(STORE, feature)
    return feature


def computed(outputs: list[SchedulerOutput]) -> Counter[str]:
    """Tokens computed for each request."""
    counts: Counter[str] = Counter()
    for output in outputs:
        for chunk in output.chunks:
            counts[chunk.state.request.request_id] += chunk.count
    return counts


def preempted(outputs: list[SchedulerOutput]) -> list[str]:
    return [state.request.request_id for output in outputs for state in output.preempted]


def reasons(engine: ModellessEngine) -> set[FinishReason]:
    return {event.finished.reason for event in engine.of("finished")}


def two_of(kind: str, engine: ModellessEngine) -> None:
    """Requests of which the second is preempted; of one text, of two, or half way through a picture."""
    if kind == "picture":
        engine.add(make_request("a", [1] * 8, max_tokens=22))
        engine.step()
        engine.step()
        image = stored(make_feature("cat", 1, 12))
        engine.add(make_request("b", [2] * 14, [image], max_tokens=8, arrival=1.0))
        return
    for index, name in enumerate("ab"):
        features = {
            "no item": [],
            "one text": [stored(make_cross("text", 7))],
            "two texts": [stored(make_cross(name, 7))],
        }[kind]
        engine.add(make_request(name, [2, index], features, max_tokens=14, arrival=index))


def test_a_swapped_request_goes_on_where_it_stopped(engine_of: Make) -> None:
    engine = engine_of(num_blocks=7, host_blocks=8)
    for index, name in enumerate("ab"):
        engine.add(make_request(name, [index] * 6, max_tokens=14, arrival=index))
    outputs = engine.run_out()
    assert preempted(outputs) == ["b"]
    assert computed(outputs) == {"a": 19, "b": 19}
    assert (
        sum(len(output.swap_out) for output in outputs) == sum(len(output.swap_in) for output in outputs) > 0
    )


def test_the_last_users_cross_table_moves_with_it_and_comes_back(engine_of: Make) -> None:
    engine = engine_of(cross=True, num_blocks=7, host_blocks=8)
    two_of("two texts", engine)
    outputs = engine.run_out()
    assert preempted(outputs)
    assert sum(len(output.projections) for output in outputs) == 2
    restored = [output for output in outputs if output.restored]
    assert len(restored) == 1 and len(restored[0].chunks) == 1, "it is read in the step that brings it back"
    assert computed(outputs) == {"a": 15, "b": 15}


def test_a_shared_cross_table_stays_when_one_of_two_goes(engine_of: Make) -> None:
    engine = engine_of(cross=True, num_blocks=8, host_blocks=8)
    two_of("one text", engine)
    outputs = engine.run_out()
    assert preempted(outputs) == ["b"]
    assert [len(output.swap_out) for output in outputs if output.swap_out] == [3]
    assert not any(output.restored for output in outputs)
    assert computed(outputs) == {"a": 15, "b": 15}


def test_a_swapped_request_that_is_cancelled_leaves_nothing_in_host_memory(engine_of: Make) -> None:
    engine = engine_of(cross=True, num_blocks=7, host_blocks=8)
    two_of("two texts", engine)
    while not engine.step().swap_out:
        pass
    assert engine.swap is not None and engine.swap.num_used > 0
    engine.scheduler.cancel(["b"], "proxy")
    engine.scheduler.cancel(["b"], "proxy")
    assert engine.swap.num_used == 0
    engine.run_out()


def test_a_failed_step_ends_what_it_was_to_bring_back(engine_of: Make) -> None:
    engine = engine_of(cross=True, num_blocks=7, host_blocks=8)
    two_of("two texts", engine)
    while not engine.step().swap_out:
        pass
    engine.scheduler.cancel(["a"], "proxy")
    output = engine.step(error=RuntimeError("broken"))
    assert output.swap_in
    assert FinishReason.ERROR in reasons(engine)


def test_host_blocks_can_be_read_once_their_copy_is_confirmed_and_not_before() -> None:
    swap, plan = SwapManager(6), make_cross("text", 7).plan
    assert len(swap.swap_out("a", [1, 2], 7, plan, [3, 4]) or ()) == 4
    assert swap.is_leaving("a") and swap.has_table(plan) and not swap.table_is_written(plan)
    with pytest.raises(AssertionError, match="confirmed"):
        swap.swap_in("a", [5, 6])
    with pytest.raises(AssertionError, match="confirmed"):
        swap.restore_table(plan.mm_hash, [5, 6])


def test_what_is_confirmed_stays_when_a_later_copy_fails() -> None:
    swap, plan = SwapManager(6), make_cross("text", 7).plan
    swap.swap_out("a", [1, 2], 7)
    swap.commit()
    swap.swap_out("b", [3], 4, plan, [4, 5])
    assert swap.fail() == ["b"]
    assert (swap.tokens("a"), swap.tokens("b"), swap.has_table(plan), swap.num_used) == (7, 0, False, 2)
    assert swap.fail() == []
    assert [copy.target for copy in swap.swap_in("a", [8, 9])] == [8, 9]
    assert swap.num_used == 0


def test_a_request_and_its_table_leave_no_host_block_when_they_are_back() -> None:
    swap, plan = SwapManager(6), make_cross("text", 7).plan
    swap.swap_out("a", [1, 2], 7, plan, [3, 4])
    swap.commit()
    assert [copy.target for copy in swap.restore_table(plan.mm_hash, [5, 6])] == [5, 6]
    assert (swap.num_used, swap.has_table(plan)) == (2, False)
    swap.swap_in("a", [7, 8])
    assert swap.num_used == 0


def failing_at(n: int) -> tuple[list[int], Callable[[], bool]]:
    """What fails the n-th copy, and a list whose one number counts the copies."""
    count = [0]

    def fails() -> bool:
        count[0] += 1
        return count[0] - 1 == n

    return count, fails


@pytest.mark.parametrize("capacity", [12 * WIDTH * 4, 1 << 20], ids=["tight", "roomy"])
@pytest.mark.parametrize(
    ("kind", "blocks"), [("no item", 5), ("picture", 8), ("one text", 8), ("two texts", 7)]
)
def test_whichever_copy_fails_the_request_is_computed_again_and_nothing_stays(
    kind, blocks, capacity, engine_of
):
    n, computed_again = -1, []
    while True:
        STORE.clear()
        engine = engine_of(
            cross="text" in kind, num_blocks=blocks, host_blocks=8, budget=6, capacity=capacity
        )
        count, engine.copy_fails = failing_at(n)
        two_of(kind, engine)
        outputs = engine.run_out()
        assert reasons(engine) == {FinishReason.LENGTH}
        engine.assert_at_rest()
        computed_again.append(sum(computed(outputs).values()))
        if count[0] <= n:
            break
        n += 1
    assert n == 2, "a copy out, and one in"
    assert computed_again[0] == computed_again[-1] < min(computed_again[1:-1])


def test_a_request_whose_copy_out_failed_gets_its_items_again(engine_of: Make) -> None:
    engine = engine_of(num_blocks=8, host_blocks=8, budget=6)
    engine.copy_fails = lambda: True
    two_of("picture", engine)
    outputs = engine.run_out()
    assert "b" in preempted(outputs)
    rows = sum(
        part.count
        for output in outputs
        for chunk in output.chunks
        for part in chunk.rows
        if chunk.state.request.request_id == "b"
    )
    assert rows > 12, "its picture was read again"
    assert not any(output.swap_in for output in outputs), "nothing is read that is not confirmed"


def test_a_request_and_its_table_do_not_come_back_in_the_step_in_which_they_go(engine_of: Make) -> None:
    engine = engine_of(cross=True, num_blocks=7, host_blocks=8)
    two_of("two texts", engine)
    outputs = engine.run_out()
    assert [output for output in outputs if output.swap_out]
    assert not [output for output in outputs if output.swap_out and output.swap_in]


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 1 << 30))
def test_blocks_are_conserved_on_both_sides_and_content_comes_back_as_it_went(seed: int) -> None:
    rng = random.Random(seed)
    STORE.clear()
    cross = rng.random() < 0.6
    engine = ModellessEngine(
        STORE,
        cross=cross,
        num_blocks=rng.randint(12, 20),
        host_blocks=rng.randint(1, 24),
        budget=rng.choice([3, 8, 32]),
        capacity=40 * WIDTH * 4,
        prefix_caching=rng.random() < 0.5,
    )
    faults = rng.choice([0.0, 0.0, 0.1, 0.5, 1.0])
    engine.copy_fails = lambda: rng.random() < faults
    texts = [stored(make_cross(f"text {i}", rng.randint(1, 20))) for i in range(3)]
    images = [stored(make_feature(f"image {i}", 1, 5)) for i in range(3)]
    for number in range(rng.randint(2, 10)):
        features = [rng.choice(texts)] if cross else rng.sample(images, rng.randint(0, 1))
        request = make_request(
            f"r{number}", rng.randint(7, 12), features, max_tokens=rng.randint(1, 16), arrival=number
        )
        engine.add(request)
        for _ in range(rng.randint(0, 4)):
            engine.step()
        if rng.random() < 0.2:
            engine.scheduler.cancel([f"r{rng.randint(0, number)}"], "proxy")
    engine.run_out(limit=2000)
    assert reasons(engine) <= {FinishReason.LENGTH, FinishReason.ABORT}
    engine.assert_at_rest()

"""Prompts are prefilled up to their first missing item, without a waiting request holding anything."""

from __future__ import annotations

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
    names,
    shares,
)
from triptych.base.errors import InternalError
from triptych.base.types import FinishReason
from triptych.pd_worker.core.outputs import ModelRunnerOutput, OverlapStats, SchedulerOutput

CAT, DOG = make_feature("cat", 4, 12), make_feature("dog", 20, 12)


def steps(engine: ModellessEngine, count: int = 4) -> list[list[tuple[str, int, int]]]:
    """The chunks of steps that have any."""
    outputs = [engine.step() for _ in range(count)]
    return [shares(output) for output in outputs if output.chunks]


def half_way(engine: ModellessEngine, **options: object) -> ModellessEngine:
    """One of two items has come, and the prompt before the other is prefilled."""
    engine.add(make_request("a", 36, [CAT, DOG], ready=[], **options))  # type: ignore[arg-type]
    engine.arrive(CAT)
    assert sum(count for step in steps(engine) for _, _, count in step) == 20
    return engine


@pytest.fixture
def waiting(make: Make) -> ModellessEngine:
    """An engine with a request of two items, of which none is there."""
    engine = make()
    engine.add(make_request("a", 36, [CAT, DOG], ready=[]))
    return engine


def overlap(engine: ModellessEngine) -> OverlapStats:
    return engine.scheduler.collect_stats().overlap


def test_a_prompt_is_prefilled_up_to_its_first_missing_item_and_then_goes_on_from_there(waiting):
    assert steps(waiting) == [[("a", 0, 4)]], "the text before the first item"
    waiting.arrive(CAT)
    assert steps(waiting) == [[("a", 4, 16)]]
    waiting.arrive(DOG)
    assert steps(waiting) == [[("a", 20, 16)]]
    assert finished(waiting)["a"].reason is FinishReason.LENGTH
    assert overlap(waiting) == OverlapStats(requests=1, tokens=20)


def test_what_stands_behind_a_missing_item_is_not_prefilled(waiting: ModellessEngine) -> None:
    waiting.arrive(DOG)
    assert steps(waiting) == [[("a", 0, 4)]]
    waiting.arrive(CAT)
    assert steps(waiting) == [[("a", 4, 16)], [("a", 20, 16)]]


def test_the_items_of_a_prefilled_part_stay_until_the_request_starts(make: Make) -> None:
    """Should its blocks be evicted, the item is needed again."""
    engine = half_way(make(num_blocks=12))
    STORE.clear()
    engine.add(make_request("text", [9] * 46))
    steps(engine)
    assert overlap(engine).lost_tokens > 0
    engine.arrive(DOG)
    engine.run_out()
    assert engine.of("item_missing") == []
    assert finished(engine)["a"].error is None


def test_nobody_is_prefilled_early_while_another_waits_for_blocks(make: Make) -> None:
    engine = make(num_blocks=16, max_model_len=64)
    engine.add(make_request("text", [9] * 40, max_tokens=4))
    engine.step()
    engine.add(make_request("big", [8] * 30, arrival=1.0))
    engine.add(make_request("a", 20, [CAT], ready=[], arrival=2.0))
    assert steps(engine, 3) == [[("text", 16, 16)], [("text", 32, 8)], [("text", 40, 1)]]


def test_only_requests_that_fit_the_free_blocks_as_a_whole_begin_early(make: Make) -> None:
    engine = make(num_blocks=20, budget=64)
    features = [make_feature(name, 4, 28) for name in ("x", "y", "z")]
    for index, feature in enumerate(features):
        engine.add(make_request(f"m{index}", [index] * 36, [feature], ready=[], arrival=float(index)))
    assert sorted(share[0] for step in steps(engine) for share in step) == ["m0", "m1"], "9 blocks each"
    assert overlap(engine).requests == 2


def test_evicted_tokens_are_not_computed_early_again(make: Make) -> None:
    engine = half_way(make(num_blocks=12))
    for number in range(3):
        engine.add(make_request(f"text{number}", [100 + number] * 46))
        chunks = [share for step in steps(engine) for share in step]
        assert {name for name, _, _ in chunks} == {f"text{number}"}
    engine.arrive(DOG)
    engine.run_out()
    assert overlap(engine) == OverlapStats(requests=1, tokens=20, lost_tokens=20)
    assert finished(engine)["a"].cached_tokens == 0


def test_chunks_end_with_a_block(make: Make) -> None:
    engine, image = make(budget=10), make_feature("cat", 2, 12)
    engine.add(make_request("a", 30, [image, make_feature("dog", 23, 4)], ready=[]))
    engine.arrive(image)
    assert steps(engine, 6) == [[("a", 0, 8)], [("a", 8, 8)], [("a", 16, 4)]], "nothing is computed twice"


def test_a_missing_item_inside_a_span_ends_the_prefill_before_the_span(make: Make) -> None:
    engine = make()
    request = make_request("a", 24, [make_feature("dog", 11, 6)], ready=[])
    request.both_ways = ((9, 20),)
    engine.add(request)
    ends = [chunk.end for output in (engine.step(), engine.step()) for chunk in output.chunks]
    assert ends and max(ends) <= 9


def test_a_span_that_begins_with_a_block_is_left_whole_to_the_next_chunk(make: Make) -> None:
    engine = make()
    request = make_request("a", 24, [make_feature("dog", 11, 6)], ready=[])
    request.both_ways = ((8, 10),)
    engine.add(request)
    assert steps(engine) == [[("a", 0, 8)]], "nothing is computed twice"


def test_an_atomic_span_above_what_is_left_of_the_step_waits(make: Make) -> None:
    engine, image = make(budget=12), make_feature("cat", 0, 12, atomic=True)
    engine.add(make_request("text", [9] * 4, max_tokens=1))
    engine.add(make_request("a", 24, [image, make_feature("dog", 12, 6)], ready=[], arrival=1.0))
    engine.arrive(image)
    assert steps(engine) == [[("text", 0, 4)], [("a", 0, 12)]]


def test_of_requests_with_one_prompt_the_first_is_prefilled_and_the_others_find_it(make: Make) -> None:
    engine = make(budget=64)
    for choice in range(3):
        engine.add(make_request(f"c{choice}", 36, [CAT, DOG], ready=[], arrival=float(choice)))
    engine.arrive(CAT)
    assert [share for step in steps(engine) for share in step] == [("c0", 0, 4), ("c0", 4, 16)]


def test_the_first_requests_of_many_with_one_text_do_not_keep_others_from_their_turn(make: Make) -> None:
    engine = make(budget=64)
    for number in range(3):
        image = make_feature(f"image {number}", 16, 4)
        engine.add(make_request(f"same{number}", 24, [image], ready=[], arrival=float(number)))
    engine.add(make_request("other", [5] * 24, [make_feature("image", 16, 4)], ready=[], arrival=9.0))
    assert steps(engine) == [[("same0", 0, 16), ("other", 0, 16)]]


def test_only_what_others_have_computed_counts_as_cached(make: Make) -> None:
    engine = make(num_blocks=64)
    engine.add(make_request("first", 12))
    engine.run_out()
    engine.add(make_request("a", 36, [make_feature("cat", 16, 8), make_feature("dog", 24, 8)], ready=[]))
    assert steps(engine) == [[("a", 12, 4)]]
    engine.arrive(make_feature("cat", 16, 8), make_feature("dog", 24, 8))
    outputs = engine.run_out()
    assert finished(engine)["a"].cached_tokens == 12
    assert sum(output.prefix_hit for output in outputs) == 12


def test_an_item_lost_in_the_gap_is_encoded_again_and_nothing_is_computed_twice(make: Make) -> None:
    engine = half_way(make())
    engine.scheduler.mark_ready([DOG.mm_hash], engine.now)  # stored, and gone again
    steps(engine)
    assert [event.item_missing.mm_hash for event in engine.of("item_missing")] == [DOG.mm_hash]
    engine.arrive(DOG)
    assert steps(engine) == [[("a", 20, 16)]]


def test_a_step_that_fails_ends_the_request_and_keeps_nothing_of_it(waiting: ModellessEngine) -> None:
    waiting.step(error=RuntimeError("no memory"))
    assert isinstance(finished(waiting)["a"].error, InternalError)
    waiting.add(make_request("b", 36, [CAT, DOG], ready=[]))
    assert steps(waiting) == [[("b", 0, 4)]]


def test_what_is_not_finite_is_never_found(waiting: ModellessEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    run = waiting.run

    def overflowing(output: SchedulerOutput) -> ModelRunnerOutput:
        result = run(output)
        result.non_finite = frozenset({0}) if output.chunks else frozenset()
        return result

    monkeypatch.setattr(waiting, "run", overflowing)
    waiting.step()
    monkeypatch.undo()
    assert isinstance(finished(waiting)["a"].error, InternalError)
    waiting.add(make_request("b", 36, [CAT, DOG], ready=[]))
    assert steps(waiting) == [[("b", 0, 4)]]


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(4, 24), st.integers(1, 8), st.booleans())
def test_in_whatever_order_items_come_all_is_computed_once_and_in_order(data, budget, block_size, atomic):
    STORE.clear()
    lengths = data.draw(st.lists(st.integers(1, min(budget, 9)), min_size=1, max_size=5))
    features, offset = [], data.draw(st.integers(0, 9))
    for index, length in enumerate(lengths):
        features.append(make_feature(f"item {index}", offset, length, atomic=atomic))
        offset += length + data.draw(st.integers(0, 3))
    engine = ModellessEngine(STORE, budget=budget, block_size=block_size, num_blocks=128)
    engine.add(make_request("a", offset + 1, features, ready=[]))
    chunks, there = [], set()
    for feature in data.draw(st.permutations(features)):
        for _ in range(data.draw(st.integers(0, 6))):
            chunks += engine.step().chunks
            missing = [f.placement.offset for f in features if f.mm_hash not in there]
            assert all(chunk.end <= min(missing) for chunk in chunks)
        engine.arrive(feature)
        there.add(feature.mm_hash)
    chunks += [chunk for output in engine.run_out() for chunk in output.chunks]
    done = 0
    for chunk in chunks:
        assert done - block_size < chunk.start <= done, "at most a part of a block is computed twice"
        assert atomic or chunk.start == done, "and that behind an atomic span only"
        done = chunk.end
    assert finished(engine)["a"].cached_tokens == 0
    engine.assert_at_rest()


def test_early_tokens_of_waiting_requests_are_counted_by_request_once(make: Make) -> None:
    engine = make(budget=4)
    engine.add(make_request("a", 36, [CAT, DOG], ready=[]))
    engine.arrive(CAT)
    assert len(steps(engine, 8)) == 5
    assert overlap(engine) == OverlapStats(requests=1, tokens=20)
    assert names(engine.of("item_missing")) == []


def test_few_tokens_are_prefilled_beside_others_but_not_in_a_step_of_their_own(make: Make) -> None:
    engine = make(budget=128)
    engine.add(make_request("a", 36, [CAT, DOG], ready=[]))
    assert steps(engine) == [], "a sixteenth of the budget is 8, and 4 stand before the first item"
    engine.add(make_request("text", [9] * 4, arrival=1.0))
    assert steps(engine) == [[("text", 0, 4), ("a", 0, 4)]]

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine_requests import ModellessEngine, make_feature, make_request, publish
from triptych.ec_connector.memory_connector import memory_store
from triptych.errors import DeadlineExceeded, InternalError, InvalidRequest, Unavailable
from triptych.pd_worker.outputs import (
    EngineEvent,
    ItemLoaded,
    ItemMissing,
    NewTokens,
    RequestAdmitted,
    RequestFinished,
    SchedulerOutput,
)
from triptych.types import FinishReason

STORE = "memory://scheduler"
Make = Callable[..., ModellessEngine]


@pytest.fixture
def make() -> Iterator[Make]:
    """An engine without a model over an empty store."""
    memory_store(STORE).clear()
    yield lambda **options: ModellessEngine(STORE, **options)
    memory_store(STORE).clear()


def shares(output: SchedulerOutput) -> list[tuple[str, int, int]]:
    """(request, first token, tokens) of each chunk."""
    return [(chunk.state.request.request_id, chunk.start, chunk.count) for chunk in output.chunks]


def finished(engine: ModellessEngine) -> dict[str, RequestFinished]:
    return {event.request_id: event for event in engine.events if isinstance(event, RequestFinished)}


def names(events: list[EngineEvent]) -> list[str]:
    return [event.request_id for event in events]


def test_a_prompt_above_the_budget_enters_in_chunks_and_ends_with_a_token(make: Make) -> None:
    engine = make(budget=16)
    engine.add(make_request("a", 40))
    assert [shares(output) for output in engine.run_out()] == [
        [("a", 0, 16)], [("a", 16, 16)], [("a", 32, 8)],
    ]  # fmt: skip
    assert engine.of(NewTokens)[0].position == 0
    engine.assert_at_rest()


def test_decodes_come_first_and_cap_the_prefill(make: Make) -> None:
    engine = make(budget=16)
    engine.add(make_request("a", 4, max_tokens=9))
    engine.step()
    engine.add(make_request("b", [5] * 40, arrival=1.0))
    assert shares(engine.step()) == [("a", 4, 1), ("b", 0, 8)]


def test_several_short_prompts_share_a_step(make: Make) -> None:
    engine = make(budget=16)
    engine.add(*(make_request(name, [i] * 5, arrival=i) for i, name in enumerate("abcd")))
    assert shares(engine.step()) == [("a", 0, 5), ("b", 0, 5), ("c", 0, 5), ("d", 0, 1)]


def test_requests_start_in_order_of_arrival_whatever_the_order_of_submission(make: Make) -> None:
    engine = make(budget=16, max_num_seqs=1)
    engine.add(make_request("late", 4, arrival=2.0), make_request("early", [9] * 4, arrival=1.0))
    assert shares(engine.step()) == [("early", 0, 4)]


def test_item_pressure_counts_those_that_wait_for_embeddings_by_those_that_run(make: Make) -> None:
    engine = make()
    assert engine.scheduler.item_pressure == 0
    images = [make_feature(name, 2, 6) for name in ("cat", "dog", "cow")]
    engine.add(*(make_request(f"m{i}", 10, [image], ready=[]) for i, image in enumerate(images)))
    engine.step()
    assert engine.scheduler.item_pressure == 3
    engine.add(make_request("a", 4, max_tokens=9), make_request("b", [9] * 4, max_tokens=9))
    engine.step()
    assert engine.scheduler.item_pressure == 1.5
    publish(memory_store(STORE), *images)
    engine.scheduler.mark_ready([image.mm_hash for image in images], engine.now)
    engine.step()
    engine.step()
    assert engine.scheduler.item_pressure == 0


def test_an_item_in_the_store_is_loaded_then_consumed_then_released(make: Make) -> None:
    engine, image = make(), make_feature("cat", 2, 6)
    publish(memory_store(STORE), image)
    engine.add(make_request("a", 10, [image], max_tokens=2))
    engine.run_out()
    assert names(engine.of(RequestAdmitted)) == ["a"]
    assert [event.mm_hash for event in engine.of(ItemLoaded)] == [image.mm_hash]
    assert finished(engine)["a"].reason is FinishReason.LENGTH
    engine.assert_at_rest()


def test_a_request_waits_for_its_item_while_text_behind_it_runs(make: Make) -> None:
    engine, image = make(), make_feature("cat", 2, 6)
    engine.add(make_request("a", 10, [image], ready=[]))
    engine.add(make_request("b", [3] * 4, arrival=1.0))
    assert shares(engine.step()) == [("b", 0, 4)]
    assert shares(engine.step()) == []
    publish(memory_store(STORE), image)
    engine.scheduler.mark_ready([image.mm_hash], engine.now)
    engine.run_out()
    assert set(finished(engine)) == {"a", "b"}


def test_a_ready_mark_may_overtake_its_request(make: Make) -> None:
    engine, image = make(), make_feature("cat", 2, 6)
    publish(memory_store(STORE), image)
    engine.scheduler.mark_ready([image.mm_hash], engine.now)
    engine.now = 2.0
    engine.add(make_request("a", 10, [image], ready=[]))
    engine.run_out()
    assert finished(engine)["a"].error is None


def test_an_old_ready_mark_says_nothing(make: Make) -> None:
    engine, image = make(), make_feature("cat", 2, 6)
    engine.scheduler.mark_ready([image.mm_hash], engine.now)
    engine.now = 60.0
    engine.add(make_request("a", 10, [image], ready=[]))
    for _ in range(4):
        engine.step()
    assert engine.of(ItemMissing) == []


def test_a_chunk_may_end_and_begin_inside_an_image(make: Make) -> None:
    engine, image = make(budget=5), make_feature("cat", 2, 12)
    publish(memory_store(STORE), image)
    engine.add(make_request("a", 16, [image]))
    rows = [
        [(part.first, part.count, part.at) for part in chunk.rows]
        for output in engine.run_out()
        for chunk in output.chunks
    ]
    assert rows == [[], [(0, 5, 0)], [(5, 5, 0)], [(10, 2, 0)]]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.sampled_from([None, ((1, 2), (5, 3)), ((0, 1), (9, 1))]))
def test_the_rows_of_all_chunks_are_the_rows_of_the_whole(budget: int, runs: object) -> None:
    memory_store(STORE).clear()
    engine = ModellessEngine(STORE, budget=budget, max_num_seqs=1)
    image = make_feature("cat", 3, 10, runs=runs)  # type: ignore[arg-type]
    publish(memory_store(STORE), image)
    engine.add(make_request("a", 20, [image]))
    gathered = [
        (part.first + i, chunk.start + part.at + i)
        for output in engine.run_out()
        for chunk in output.chunks
        for part in chunk.rows
        for i in range(part.count)
    ]
    tokens = [3 + start + i for start, count in (image.placement.runs or ((0, 10),)) for i in range(count)]
    assert gathered == list(enumerate(tokens))


def test_a_chunk_of_special_tokens_alone_needs_no_embedding(make: Make) -> None:
    engine = make(budget=12)
    video = make_feature("film", 0, 20, runs=((12, 8),))
    publish(memory_store(STORE), video)
    engine.add(make_request("a", 24, [video]))
    first = next(output for output in engine.run_out() if output.chunks)
    assert shares(first) == [("a", 0, 12)]
    assert first.chunks[0].rows == ()


def test_an_atomic_span_enters_whole(make: Make) -> None:
    engine, image = make(budget=12), make_feature("cat", 4, 10, atomic=True)
    publish(memory_store(STORE), image)
    engine.add(make_request("a", 18, [image]))
    assert [shares(output) for output in engine.run_out() if output.chunks] == [
        [("a", 0, 4)], [("a", 4, 12)], [("a", 16, 2)],
    ]  # fmt: skip


def test_an_atomic_span_is_not_kept_out_by_text_that_decodes(make: Make) -> None:
    engine, image = make(budget=12), make_feature("cat", 0, 12, atomic=True)
    publish(memory_store(STORE), image)
    engine.add(make_request("text", 4, max_tokens=30))
    engine.step()
    engine.add(make_request("a", [8] * 14, [image], arrival=1.0))
    steps = [shares(engine.step()) for _ in range(3)]
    assert ("a", 0, 12) in [share for step in steps for share in step]


def test_an_atomic_span_above_the_budget_is_refused(make: Make) -> None:
    engine, image = make(budget=8), make_feature("cat", 0, 10, atomic=True)
    with pytest.raises(InvalidRequest, match="--max-num-batched-tokens 8"):
        engine.add(make_request("a", 14, [image]))


def test_items_that_can_never_be_resident_together_are_refused(make: Make) -> None:
    engine = make(capacity=16 * 10)
    with pytest.raises(InvalidRequest, match="--encoder-cache-memory"):
        engine.add(make_request("a", 20, [make_feature("x", 0, 6), make_feature("y", 8, 6)]))
    engine.assert_at_rest()


def test_rows_that_do_not_fit_the_placeholders_are_refused(make: Make) -> None:
    image, other = make_feature("cat", 0, 6), make_feature("cat", 0, 5)
    mixed = type(image)(image.plan, other.placement)
    with pytest.raises(InvalidRequest, match="6 embeddings for 5 placeholders"):
        make().add(make_request("a", 20, [mixed]))


def test_a_request_that_lies_about_a_resident_item_ends_alone(make: Make) -> None:
    engine, image, larger = make(), make_feature("cat", 0, 4), make_feature("cat", 0, 9)
    publish(memory_store(STORE), image)
    engine.add(make_request("a", 12, [image], max_tokens=6))
    engine.step()
    engine.step()
    engine.add(make_request("liar", [5] * 12, [larger], arrival=1.0))
    engine.run_out()
    assert isinstance(finished(engine)["liar"].error, InvalidRequest)
    assert finished(engine)["a"].error is None
    engine.assert_at_rest()


def test_a_request_that_lies_about_an_item_first_fails_no_other_load(make: Make) -> None:
    engine, image, larger = make(), make_feature("cat", 0, 4), make_feature("cat", 0, 9)
    engine.add(make_request("liar", [5] * 12, [larger], ready=[]))
    engine.step()
    engine.add(make_request("a", 12, [image], arrival=1.0))
    engine.step()
    assert isinstance(finished(engine)["a"].error, Unavailable)
    engine.scheduler.cancel(["liar"], "proxy")
    publish(memory_store(STORE), image)
    engine.add(make_request("a", 12, [image], arrival=2.0, attempt=2))
    engine.run_out()
    assert finished(engine)["a"].error is None
    engine.assert_at_rest()


def test_a_request_that_waits_for_blocks_keeps_no_embedding_from_others_for_ever(make: Make) -> None:
    engine = make(num_blocks=8, block_size=4, max_model_len=32, prefix_caching=False, capacity=16 * 8)
    images = [make_feature(name, 0, 4) for name in ("x", "y", "z")]
    publish(memory_store(STORE), *images)
    engine.add(make_request("text", 16, max_tokens=8))
    for index, image in enumerate(images):
        engine.add(make_request(f"m{index}", [index] * 20, [image], arrival=1.0 + index, max_tokens=3))
    engine.run_out()
    assert {event.error for event in finished(engine).values()} == {None}
    assert len(finished(engine)) == 4
    engine.assert_at_rest()


def test_a_prompt_as_long_as_the_model_is_refused(make: Make) -> None:
    with pytest.raises(InvalidRequest, match="the model takes 32"):
        make(max_model_len=32).add(make_request("a", 32))


def test_media_wait_for_room_in_order_and_text_passes_them(make: Make) -> None:
    engine = make(capacity=16 * 10)
    big, small = make_feature("big", 0, 8), make_feature("small", 0, 2)
    other = make_feature("other", 0, 8)
    engine.add(make_request("a", 12, [big], ready=[]))
    engine.add(make_request("b", 12, [other], ready=[], arrival=1.0))
    engine.add(make_request("c", 12, [small], ready=[], arrival=2.0))
    engine.add(make_request("d", 4, arrival=3.0))
    engine.step()
    assert names(engine.of(RequestAdmitted)) == ["a", "d"]
    engine.scheduler.cancel(["a"], "proxy")
    engine.step()
    assert names(engine.of(RequestAdmitted)) == ["a", "d", "b", "c"]


def test_two_adjacent_items_enter_a_cache_that_holds_just_them(make: Make) -> None:
    engine = make(capacity=16 * 8, budget=6)
    items = [make_feature("x", 0, 4), make_feature("y", 4, 4)]
    publish(memory_store(STORE), *items)
    engine.add(make_request("a", 9, items), make_request("b", 9, items, arrival=1.0))
    engine.run_out()
    assert set(finished(engine)) == {"a", "b"}
    engine.assert_at_rest()


def test_an_item_gone_from_the_store_is_reported_once_and_awaited(make: Make) -> None:
    engine, image = make(), make_feature("cat", 2, 6)
    engine.add(make_request("a", 10, [image]), make_request("b", 10, [image], arrival=1.0))
    for _ in range(5):
        engine.step()
    assert names(engine.of(ItemMissing)) == ["a", "b"]
    publish(memory_store(STORE), image)
    engine.scheduler.mark_ready([image.mm_hash], engine.now)
    engine.run_out()
    assert {event.error for event in finished(engine).values()} == {None}
    engine.assert_at_rest()


def test_a_request_that_knows_of_a_loss_is_not_told_again_for_others_that_come_with_old_news(
    make: Make,
) -> None:
    engine, image = make(), make_feature("cat", 2, 6)
    engine.scheduler.mark_ready([image.mm_hash], engine.now)
    for arrival, name in enumerate("abcd"):  # the store was asked for them before it was flushed
        engine.add(make_request(name, 10, [image], arrival=float(arrival)))
        for _ in range(4):
            engine.step()
    assert names(engine.of(ItemMissing)) == ["a", "b", "c", "d"]
    publish(memory_store(STORE), image)
    engine.scheduler.mark_ready([image.mm_hash], engine.now)
    engine.run_out()
    assert {event.error for event in finished(engine).values()} == {None}
    engine.assert_at_rest()


def test_a_loss_is_told_again_when_it_happens_again(make: Make) -> None:
    engine, image = make(), make_feature("cat", 2, 6)
    engine.add(make_request("a", 10, [image]))
    for _ in range(2):
        for _ in range(4):
            engine.step()
        engine.scheduler.mark_ready([image.mm_hash], engine.now)
    assert names(engine.of(ItemMissing)) == ["a", "a"]


def test_a_mark_is_worth_nothing_once_the_item_is_lost(make: Make) -> None:
    engine, image = make(), make_feature("cat", 2, 6)
    engine.scheduler.mark_ready([image.mm_hash], engine.now)
    engine.add(make_request("a", 10, [image]))
    for _ in range(4):
        engine.step()
    engine.add(make_request("b", 10, [image], ready=[], arrival=1.0))  # its item is being encoded
    for _ in range(4):
        engine.step()
    assert names(engine.of(ItemMissing)) == ["a"]
    publish(memory_store(STORE), image)
    engine.scheduler.mark_ready([image.mm_hash], engine.now)
    engine.run_out()
    engine.assert_at_rest()


def test_an_item_that_another_request_made_resident_costs_no_load(make: Make) -> None:
    engine, image = make(), make_feature("cat", 2, 6)
    publish(memory_store(STORE), image)
    engine.add(make_request("a", 10, [image]))
    engine.run_out()
    memory_store(STORE).clear()
    engine.add(make_request("b", [4, 4, *range(8)], [image]))
    engine.run_out()
    assert finished(engine)["b"].error is None
    assert names(engine.of(ItemLoaded)) == ["a", "b"]


def test_a_prefix_hit_over_a_whole_item_needs_no_embedding(make: Make) -> None:
    engine, image = make(capacity=16 * 6), make_feature("cat", 2, 6)
    publish(memory_store(STORE), image)
    engine.add(make_request("a", 12, [image]))
    engine.run_out()
    other = make_feature("dog", 0, 6)
    publish(memory_store(STORE), other)
    engine.add(make_request("evictor", [1] * 8, [other]))
    engine.run_out()
    assert image.mm_hash not in engine.resident
    memory_store(STORE).clear()
    engine.add(make_request("b", 12, [image], ready=[]))
    engine.run_out()
    assert finished(engine)["b"].usage.cached_tokens == 8
    engine.assert_at_rest()


def test_the_latest_request_gives_way_and_all_end(make: Make) -> None:
    engine = make(num_blocks=10, block_size=4, max_model_len=40, prefix_caching=False)
    for i, name in enumerate("abc"):
        engine.add(make_request(name, [i] * 6, max_tokens=20, arrival=i))
    outputs = engine.run_out()
    preempted = [state.request.request_id for output in outputs for state in output.preempted]
    assert preempted
    assert "a" not in preempted
    ended = finished(engine)
    assert {event.usage.completion_tokens for event in ended.values()} == {20}
    positions = [event.position for event in engine.of(NewTokens) if event.request_id == "c"]
    assert positions == list(range(20))
    engine.assert_at_rest()


def test_a_preempted_request_gets_its_items_again(make: Make) -> None:
    engine = make(num_blocks=8, block_size=4, max_model_len=32, prefix_caching=False, capacity=16 * 6)
    image = make_feature("cat", 0, 6)
    publish(memory_store(STORE), image)
    engine.add(make_request("a", 6, max_tokens=24))
    engine.add(make_request("b", [3] * 8, [image], max_tokens=16, arrival=1.0))
    outputs = engine.run_out()
    assert [state.request.request_id for output in outputs for state in output.preempted] == ["b"]
    assert finished(engine)["b"].usage.completion_tokens == 16
    engine.assert_at_rest()


def test_a_request_past_its_deadline_ends_with_an_error_wherever_it_stands(make: Make) -> None:
    engine = make(max_num_seqs=1)
    engine.add(make_request("running", 4, max_tokens=100, deadline=5.0))
    engine.add(make_request("waiting", 4, arrival=1.0, deadline=5.0))
    engine.step()
    engine.now = 5.0
    engine.step()
    assert {type(event.error) for event in finished(engine).values()} == {DeadlineExceeded}
    assert set(finished(engine)) == {"running", "waiting"}
    engine.assert_at_rest()


@pytest.mark.parametrize("steps", range(6))
def test_cancel_in_every_state_frees_everything(make: Make, steps: int) -> None:
    engine, image = make(budget=4), make_feature("cat", 2, 6)
    publish(memory_store(STORE), image)
    engine.add(make_request("a", 12, [image], max_tokens=50))
    for _ in range(steps):
        engine.step()
    engine.scheduler.cancel(["a", "unknown"], "proxy")
    engine.scheduler.cancel(["a"], "proxy")
    engine.step()
    assert finished(engine)["a"].reason is FinishReason.ABORT
    engine.assert_at_rest()


def test_another_proxy_cannot_cancel_a_request(make: Make) -> None:
    engine = make()
    engine.add(make_request("a", 4))
    engine.scheduler.cancel(["a"], "stranger")
    engine.run_out()
    assert finished(engine)["a"].reason is FinishReason.LENGTH


def test_a_failed_step_ends_its_batch_and_nothing_else(make: Make) -> None:
    engine = make(budget=4)
    engine.add(make_request("a", 4, max_tokens=5), make_request("b", [9] * 4, arrival=1.0))
    engine.step(error=RuntimeError("no memory"))
    assert type(finished(engine)["a"].error) is InternalError
    engine.run_out()
    assert finished(engine)["b"].error is None
    engine.assert_at_rest()


def test_a_later_attempt_takes_the_place_of_the_earlier_one(make: Make) -> None:
    engine = make()
    engine.add(make_request("a", 4, max_tokens=50))
    engine.step()
    engine.add(make_request("a", 4, attempt=2))
    engine.add(make_request("a", 4, attempt=1))
    engine.run_out()
    ends = [(event.attempt, event.reason) for event in engine.of(RequestFinished)]
    assert ends == [(1, FinishReason.ABORT), (2, FinishReason.LENGTH)]


def test_resumed_tokens_are_computed_and_not_told_again(make: Make) -> None:
    engine = make()
    request = make_request("a", 4, max_tokens=2)
    request.output_token_ids.extend([5, 6, 7])
    engine.add(request)
    engine.run_out()
    assert [event.position for event in engine.of(NewTokens)] == [3, 4]
    assert finished(engine)["a"].usage.completion_tokens == 5


def test_a_resumed_request_whose_output_had_ended_computes_nothing(make: Make) -> None:
    engine = make()
    request = make_request("a", 4)
    request.output.finished = FinishReason.STOP
    engine.add(request)
    assert engine.step().chunks == []
    assert finished(engine)["a"].reason is FinishReason.STOP
    engine.assert_at_rest()


def test_the_output_ends_where_the_model_ends(make: Make) -> None:
    engine = make(max_model_len=16)
    engine.add(make_request("a", 10, max_tokens=100))
    engine.run_out()
    assert finished(engine)["a"].usage.completion_tokens == 6


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_every_request_ends_and_nothing_is_kept(seed: int) -> None:
    """Random traffic over few blocks and little room: loss in the store, failed steps, cancels."""
    rng = random.Random(seed)
    store = memory_store(STORE)
    store.clear()
    engine = ModellessEngine(
        STORE,
        num_blocks=rng.randint(8, 20),
        budget=rng.choice([3, 8, 16]),
        max_num_seqs=rng.randint(1, 6),
        capacity=16 * rng.randint(12, 30),
        max_model_len=32,
        prefix_caching=rng.random() < 0.7,
    )
    pool = [f"i{i}" for i in range(4)]
    requests = [_random_request(rng, pool, f"r{i}") for i in range(12)]
    for step in range(500):
        if requests and rng.random() < 0.4:
            engine.add(requests.pop())
        _disturb(rng, engine)
        engine.step(error=RuntimeError("x") if rng.random() < 0.02 else None)
        for event in engine.of(ItemMissing):
            key = event.mm_hash  # type: ignore[attr-defined]
            _publish_again(engine, key)
        if step > 60 and not requests and not engine.scheduler.num_running + engine.scheduler.num_waiting:
            break
    assert len(engine.of(RequestFinished)) == 12
    engine.assert_at_rest()
    assert engine.cache.used <= engine.cache.capacity


def _random_request(rng: random.Random, pool: list[str], name: str):  # type: ignore[no-untyped-def]
    features, offset = [], rng.randint(0, 3)
    for _ in range(rng.choice([0, 1, 1, 2])):
        item = rng.choice(pool)
        length = 3 + pool.index(item)
        features.append(make_feature(item, offset, length, atomic=False))
        offset += length + rng.randint(0, 2)
    prompt = [rng.randint(0, 1)] * (offset + rng.randint(1, 6))
    return make_request(name, prompt, features, max_tokens=rng.randint(1, 8), arrival=float(name[1:]))


def _disturb(rng: random.Random, engine: ModellessEngine) -> None:
    if rng.random() < 0.3:
        memory_store(STORE).clear()
    if rng.random() < 0.05:
        engine.scheduler.cancel([f"r{rng.randint(0, 11)}"], "proxy")


def _publish_again(engine: ModellessEngine, key: str) -> None:
    index = next(i for i in range(4) if make_feature(f"i{i}", 0, 3 + i).mm_hash == key)
    publish(memory_store(STORE), make_feature(f"i{index}", 0, 3 + index))
    engine.scheduler.mark_ready([key], engine.now)

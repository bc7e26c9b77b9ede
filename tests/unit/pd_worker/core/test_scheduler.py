from __future__ import annotations

import random

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
    publish,
    shares,
)
from triptych.base.errors import DeadlineExceeded, InternalError, InvalidRequest
from triptych.base.types import FinishReason
from triptych.pd_worker.core.request import RequestStatus


def test_a_prompt_above_the_budget_enters_in_chunks_and_ends_with_a_token(make: Make) -> None:
    engine = make(budget=16)
    engine.add(make_request("a", 40))
    assert [shares(output) for output in engine.run_out()] == [
        [("a", 0, 16)], [("a", 16, 16)], [("a", 32, 8)],
    ]  # fmt: skip
    assert engine.of("tokens")[0].position == 0


def test_a_whole_request_is_as_long_as_it_took_since_it_came(make: Make) -> None:
    engine = make()
    engine.now = 5.0
    engine.add(make_request("a", 4, max_tokens=3, arrival=1.0))
    engine.run_out()
    assert engine.scheduler.collect_stats().latencies.whole == [4.0]


def test_decodes_come_first_and_cap_the_prefill(make: Make) -> None:
    engine = make(budget=16)
    engine.add(make_request("a", 4, max_tokens=9))
    engine.step()
    engine.add(make_request("b", [5] * 40, arrival=1.0))
    assert shares(engine.step()) == [("a", 4, 1), ("b", 0, 8)]


def test_a_steps_seconds_are_the_work_of_its_prompts_by_their_tokens_among_all(make: Make) -> None:
    engine = make(budget=16)
    engine.add(make_request("decodes", 4, max_tokens=2))
    engine.step()
    engine.add(make_request("long", [5] * 5), make_request("short", [6] * 2))
    output = engine.scheduler.schedule(3.0)
    engine.events += engine.scheduler.update(output, engine.run(output), 5.0)
    work = {name: end.work_seconds for name, end in finished(engine).items()}
    assert work == {"decodes": 0.0, "long": 2.0 * 5 / 8, "short": 2.0 * 2 / 8}


def test_no_chunk_ends_inside_a_span_while_its_item_is_loading(make: Make) -> None:
    engine = make(budget=32)
    request = make_request("a", 24, [make_feature("dog", 11, 6)])
    request.both_ways = ((2, 20),)
    publish(STORE, request.features[0])
    engine.add(request)
    ends = [chunk.end for output in engine.run_out() for chunk in output.chunks]
    assert ends and not [end for end in ends if 2 < end < 20]


def test_requests_start_in_order_of_arrival_and_not_of_submission(make: Make) -> None:
    engine = make(budget=16, max_num_seqs=1)
    engine.add(make_request("late", 4, arrival=2.0), make_request("early", [9] * 4, arrival=1.0))
    assert shares(engine.step()) == [("early", 0, 4)]


def test_a_prompt_as_long_as_the_model_is_refused(make: Make) -> None:
    with pytest.raises(InvalidRequest, match="the model takes 32"):
        make(max_model_len=32).add(make_request("a", 32))


def test_the_latest_request_gives_way_and_all_end(make: Make) -> None:
    engine = make(num_blocks=10, block_size=4, max_model_len=40, prefix_caching=False)
    for i, name in enumerate("abc"):
        engine.add(make_request(name, [i] * 6, max_tokens=20, arrival=i))
    outputs = engine.run_out()
    preempted = [state.request.request_id for output in outputs for state in output.preempted]
    assert preempted
    assert "a" not in preempted
    ended = finished(engine)
    assert {event.completion_tokens for event in ended.values()} == {20}
    positions = [event.position for event in engine.of("tokens") if event.request_id == "c"]
    assert positions == list(range(20))


def test_a_preempted_request_gets_its_items_again(make: Make) -> None:
    engine = make(num_blocks=8, block_size=4, max_model_len=32, prefix_caching=False, capacity=16 * 6)
    image = make_feature("cat", 0, 6)
    publish(STORE, image)
    engine.add(make_request("a", 6, max_tokens=24))
    engine.add(make_request("b", [3] * 8, [image], max_tokens=16, arrival=1.0))
    outputs = engine.run_out()
    assert [state.request.request_id for output in outputs for state in output.preempted] == ["b"]
    assert finished(engine)["b"].completion_tokens == 16


def test_a_preempted_request_keeps_the_room_for_its_items(make: Make) -> None:
    engine = make(num_blocks=8, block_size=4, max_model_len=32, prefix_caching=False, capacity=16 * 6)
    image = make_feature("cat", 0, 6)
    publish(STORE, image)
    engine.add(make_request("a", 6, max_tokens=24))
    engine.add(make_request("b", [3] * 8, [image], max_tokens=16, arrival=1.0))
    preempted = next(state for _ in range(40) for state in engine.step().preempted)
    assert preempted.request.request_id == "b"
    assert preempted.status is RequestStatus.PREEMPTED, "not admitted anew"
    engine.run_out()


def test_a_request_past_its_deadline_ends_with_an_error_wherever_it_stands(make: Make) -> None:
    engine = make(max_num_seqs=1)
    engine.add(make_request("running", 4, max_tokens=100, deadline=5.0))
    engine.add(make_request("waiting", 4, arrival=1.0, deadline=5.0))
    engine.step()
    engine.now = 5.0
    engine.step()
    assert {type(event.error) for event in finished(engine).values()} == {DeadlineExceeded}
    assert set(finished(engine)) == {"running", "waiting"}


@pytest.mark.parametrize("steps", range(6))
def test_cancel_in_every_state_frees_everything(make: Make, steps: int) -> None:
    engine, image = make(budget=4), make_feature("cat", 2, 6)
    publish(STORE, image)
    engine.add(make_request("a", 12, [image], max_tokens=50))
    for _ in range(steps):
        engine.step()
    engine.scheduler.cancel(["a", "unknown"], "proxy")
    engine.scheduler.cancel(["a"], "proxy")
    engine.step()
    assert finished(engine)["a"].reason is FinishReason.ABORT


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


def test_a_later_attempt_takes_the_place_of_the_earlier_one(make: Make) -> None:
    engine = make()
    engine.add(make_request("a", 4, max_tokens=50))
    engine.step()
    engine.add(make_request("a", 4, attempt=2))
    engine.add(make_request("a", 4, attempt=1))
    engine.run_out()
    ends = [(event.attempt, event.finished.reason) for event in engine.of("finished")]
    assert ends == [(1, FinishReason.ABORT), (2, FinishReason.LENGTH)]


def test_resumed_tokens_are_computed_and_not_sent_again(make: Make) -> None:
    engine = make()
    request = make_request("a", 4, max_tokens=2)
    request.output_token_ids.extend([5, 6, 7])
    engine.add(request)
    engine.run_out()
    assert [event.position for event in engine.of("tokens")] == [3, 4]
    assert finished(engine)["a"].completion_tokens == 5


def test_a_resumed_request_whose_output_had_ended_computes_nothing(make: Make) -> None:
    engine = make()
    request = make_request("a", 4)
    request.output.finished = FinishReason.STOP
    engine.add(request)
    assert engine.step().chunks == []
    assert finished(engine)["a"].reason is FinishReason.STOP


def test_the_output_ends_where_the_model_ends(make: Make) -> None:
    engine = make(max_model_len=16)
    engine.add(make_request("a", 10, max_tokens=100))
    engine.run_out()
    assert finished(engine)["a"].completion_tokens == 6


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_every_request_ends_and_nothing_is_kept(seed: int) -> None:
    """Random traffic over few blocks and little room: loss in the store, failed steps, cancels."""
    rng = random.Random(seed)
    STORE.clear()
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
        for event in engine.of("item_missing"):
            key = event.item_missing.mm_hash
            _publish_again(engine, key)
        if step > 60 and not requests and engine.idle:
            break
    assert len(engine.of("finished")) == 12
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
        STORE.clear()
    if rng.random() < 0.05:
        engine.scheduler.cancel([f"r{rng.randint(0, 11)}"], "proxy")


def _publish_again(engine: ModellessEngine, key: str) -> None:
    features = (make_feature(f"i{index}", 0, 3 + index) for index in range(4))
    engine.arrive(*(feature for feature in features if feature.mm_hash == key))

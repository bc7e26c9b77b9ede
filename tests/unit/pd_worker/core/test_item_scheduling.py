"""How the scheduler brings requests and the embeddings they need together, without a model."""

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
    publish,
    shares,
)
from triptych.base.errors import InvalidRequest, Unavailable
from triptych.ec_connector.base import ECConnectorOutput, FailedLoad
from triptych.pd_worker.core.items.tracker import MOVE_TIMEOUT


def test_each_load_is_counted_once_with_its_seconds_and_its_way(make: Make) -> None:
    engine = make()
    images = [make_feature(name, 2, 6) for name in ("cat", "dog")]
    publish(STORE, *images)
    engine.add(*(make_request(f"m{i}", 10, [image]) for i, image in enumerate(images)))
    engine.run_out()
    items = engine.scheduler.collect_stats().items
    assert (items.fetched, len(items.load_seconds), sum(items.loads.values())) == (2, 2, 2)
    assert engine.scheduler.collect_stats().items.load_seconds == []


def test_item_pressure_counts_those_that_wait_for_embeddings_by_those_that_run(make: Make) -> None:
    engine = make()
    assert engine.scheduler.collect_stats().item_pressure == 0
    images = [make_feature(name, 2, 6) for name in ("cat", "dog", "cow")]
    engine.add(*(make_request(f"m{i}", 10, [image], ready=[]) for i, image in enumerate(images)))
    engine.step()
    assert engine.scheduler.collect_stats().item_pressure == 3
    engine.add(make_request("a", 4, max_tokens=9), make_request("b", [9] * 4, max_tokens=9))
    engine.step()
    assert engine.scheduler.collect_stats().item_pressure == 1.5
    engine.arrive(*images)
    engine.step()
    engine.step()
    assert engine.scheduler.collect_stats().item_pressure == 0


def test_a_request_waits_for_its_item_while_text_behind_it_runs(make: Make) -> None:
    engine, image = make(), make_feature("cat", 2, 6)
    engine.add(make_request("a", 10, [image], ready=[]))
    engine.add(make_request("b", [3] * 4, arrival=1.0))
    assert shares(engine.step()) == [("b", 0, 4)]
    assert shares(engine.step()) == []
    engine.arrive(image)
    engine.run_out()
    assert set(finished(engine)) == {"a", "b"}


def test_a_ready_mark_may_overtake_its_request(make: Make) -> None:
    engine, image = make(), make_feature("cat", 2, 6)
    engine.arrive(image)
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
    assert engine.of("item_missing") == []


def test_a_few_tokens_before_an_image_that_is_being_moved_wait_for_it(make: Make) -> None:
    engine, image = make(), make_feature("cat", 2, 6)
    publish(STORE, image)
    engine.add(make_request("a", 10, [image]))
    chunks = [(chunk.start, chunk.count) for output in engine.run_out() for chunk in output.chunks]
    assert chunks[0] == (0, 10), "one step computes the whole prompt"


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 20), st.sampled_from([None, ((1, 2), (5, 3)), ((0, 1), (9, 1))]))
def test_the_rows_of_all_chunks_are_the_rows_of_the_whole(budget: int, runs: object) -> None:
    STORE.clear()
    engine = ModellessEngine(STORE, budget=budget, max_num_seqs=1)
    image = make_feature("cat", 3, 10, runs=runs)  # type: ignore[arg-type]
    publish(STORE, image)
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
    publish(STORE, video)
    engine.add(make_request("a", 24, [video]))
    first = next(output for output in engine.run_out() if output.chunks)
    assert shares(first) == [("a", 0, 12)]
    assert first.chunks[0].rows == ()


def test_an_atomic_span_enters_whole(make: Make) -> None:
    engine, image = make(budget=12), make_feature("cat", 4, 10, atomic=True)
    publish(STORE, image)
    engine.add(make_request("a", 18, [image]))
    assert [shares(output) for output in engine.run_out() if output.chunks] == [
        [("a", 0, 4)], [("a", 4, 12)], [("a", 16, 2)],
    ]  # fmt: skip


def test_an_atomic_span_is_not_kept_out_by_text_that_decodes(make: Make) -> None:
    engine, image = make(budget=12), make_feature("cat", 0, 12, atomic=True)
    publish(STORE, image)
    engine.add(make_request("text", 4, max_tokens=30))
    engine.step()
    engine.add(make_request("a", [8] * 14, [image], arrival=1.0))
    steps = [shares(engine.step()) for _ in range(3)]
    assert ("a", 0, 12) in [share for step in steps for share in step]


def test_a_span_of_text_and_items_that_attends_both_ways_enters_whole(make: Make) -> None:
    engine, image = make(budget=12), make_feature("cat", 4, 6)
    publish(STORE, image)
    request = make_request("a", 18, [image])
    request.both_ways = ((3, 14),)
    engine.add(request)
    assert [shares(output) for output in engine.run_out() if output.chunks] == [
        [("a", 0, 3)], [("a", 3, 12)], [("a", 15, 3)],
    ]  # fmt: skip


def test_a_span_of_the_prompt_above_the_budget_is_refused(make: Make) -> None:
    request = make_request("a", 14)
    request.both_ways = ((0, 10),)
    with pytest.raises(
        InvalidRequest, match="10 tokens of the prompt at once are above --max-num-batched-tokens 8"
    ):
        make(budget=8).add(request)


def test_an_atomic_span_above_the_budget_is_refused(make: Make) -> None:
    engine, image = make(budget=8), make_feature("cat", 0, 10, atomic=True)
    with pytest.raises(InvalidRequest, match="--max-num-batched-tokens 8"):
        engine.add(make_request("a", 14, [image]))


def test_items_that_can_never_be_resident_together_are_refused(make: Make) -> None:
    engine = make(capacity=16 * 10)
    with pytest.raises(InvalidRequest, match="--encoder-cache-memory"):
        engine.add(make_request("a", 20, [make_feature("x", 0, 6), make_feature("y", 8, 6)]))


def test_rows_that_do_not_fit_the_placeholders_are_refused(make: Make) -> None:
    image, other = make_feature("cat", 0, 6), make_feature("cat", 0, 5)
    mixed = type(image)(image.plan, other.placement)
    with pytest.raises(InvalidRequest, match="6 embeddings for 5 placeholders"):
        make().add(make_request("a", 20, [mixed]))


def test_a_request_that_lies_about_a_resident_item_ends_alone(make: Make) -> None:
    engine, image, larger = make(), make_feature("cat", 0, 4), make_feature("cat", 0, 9)
    publish(STORE, image)
    engine.add(make_request("a", 12, [image], max_tokens=6))
    engine.step()
    engine.step()
    engine.add(make_request("liar", [5] * 12, [larger], arrival=1.0))
    engine.run_out()
    assert isinstance(finished(engine)["liar"].error, InvalidRequest)
    assert finished(engine)["a"].error is None


def test_a_request_that_lies_about_an_item_first_fails_no_other_load(make: Make) -> None:
    engine, image, larger = make(), make_feature("cat", 0, 4), make_feature("cat", 0, 9)
    engine.add(make_request("liar", [5] * 12, [larger], ready=[]))
    engine.step()
    engine.add(make_request("a", 12, [image], arrival=1.0))
    engine.step()
    assert isinstance(finished(engine)["a"].error, Unavailable)
    engine.scheduler.cancel(["liar"], "proxy")
    publish(STORE, image)
    engine.add(make_request("a", 12, [image], arrival=2.0, attempt=2))
    engine.run_out()
    assert finished(engine)["a"].error is None


def test_a_request_that_waits_for_blocks_does_not_keep_embeddings_from_others(make: Make) -> None:
    engine = make(num_blocks=8, block_size=4, max_model_len=32, prefix_caching=False, capacity=16 * 8)
    images = [make_feature(name, 0, 4) for name in ("x", "y", "z")]
    publish(STORE, *images)
    engine.add(make_request("text", 16, max_tokens=8))
    for index, image in enumerate(images):
        engine.add(make_request(f"m{index}", [index] * 20, [image], arrival=1.0 + index, max_tokens=3))
    engine.run_out()
    assert {event.error for event in finished(engine).values()} == {None}
    assert len(finished(engine)) == 4


def test_media_wait_for_room_in_order_and_text_passes_them(make: Make) -> None:
    engine = make(capacity=16 * 10)
    big, small = make_feature("big", 0, 8), make_feature("small", 0, 2)
    other = make_feature("other", 0, 8)
    engine.add(make_request("a", 12, [big], ready=[]))
    engine.add(make_request("b", 12, [other], ready=[], arrival=1.0))
    engine.add(make_request("c", 12, [small], ready=[], arrival=2.0))
    engine.add(make_request("d", 4, arrival=3.0))
    engine.step()
    assert names(engine.of("admitted")) == ["a", "d"]
    engine.scheduler.cancel(["a"], "proxy")
    engine.step()
    assert names(engine.of("admitted")) == ["a", "d", "b", "c"]


def test_two_adjacent_items_enter_a_cache_that_holds_just_them(make: Make) -> None:
    engine = make(capacity=16 * 8, budget=6)
    items = [make_feature("x", 0, 4), make_feature("y", 4, 4)]
    publish(STORE, *items)
    engine.add(make_request("a", 9, items), make_request("b", 9, items, arrival=1.0))
    engine.run_out()
    assert set(finished(engine)) == {"a", "b"}


def test_an_item_gone_from_the_store_is_reported_once_and_awaited(make: Make) -> None:
    engine, image = make(), make_feature("cat", 2, 6)
    engine.add(make_request("a", 10, [image]), make_request("b", 10, [image], arrival=1.0))
    for _ in range(5):
        engine.step()
    assert names(engine.of("item_missing")) == ["a", "b"]
    engine.arrive(image)
    engine.run_out()
    assert {event.error for event in finished(engine).values()} == {None}


def test_a_loss_is_reported_once_to_a_request_even_if_later_ones_come_with_an_old_ready_mark(make):
    engine, image = make(), make_feature("cat", 2, 6)
    engine.scheduler.mark_ready([image.mm_hash], engine.now)
    for arrival, name in enumerate("abcd"):  # the store was asked for them before it was flushed
        engine.add(make_request(name, 10, [image], arrival=float(arrival)))
        for _ in range(4):
            engine.step()
    assert names(engine.of("item_missing")) == ["a", "b", "c", "d"]
    engine.arrive(image)
    engine.run_out()
    assert {event.error for event in finished(engine).values()} == {None}


def test_a_load_that_fails_while_its_request_runs_is_started_again(make: Make) -> None:
    engine, image = make(overlap=False), make_feature("cat", 4, 12)
    publish(STORE, image)
    engine.add(make_request("a", 36, [image]))
    engine.step()
    output = engine.scheduler.schedule(engine.now)
    result = engine.run(output)
    assert (shares(output), result.ec_connector_output.loaded) == ([("a", 0, 4)], [image.mm_hash])
    # The copy into the encoder cache has failed after all.
    del engine.resident[image.mm_hash]
    result.ec_connector_output = ECConnectorOutput(failed=[FailedLoad(image.mm_hash, "the copy failed")])
    engine.events += engine.scheduler.update(output, result, engine.now)
    assert engine.scheduler.num_running == 1
    engine.scheduler.mark_ready([image.mm_hash], engine.now)
    engine.run_out()
    assert finished(engine)["a"].error is None


def test_a_move_to_the_device_that_never_ends_is_begun_again(make: Make, monkeypatch) -> None:
    engine, image = make(), make_feature("cat", 0, 6)
    publish(STORE, image)
    engine.add(make_request("a", 8, [image]))
    with monkeypatch.context() as lost:
        plain = engine.worker.start_load_caches
        lost.setattr(
            engine.worker,
            "start_load_caches",
            lambda metadata, cache: None if metadata.moves else plain(metadata, cache),
        )
        for _ in range(4):
            assert not engine.step().chunks
    engine.now += MOVE_TIMEOUT + 1
    for _ in range(4):
        engine.step()
    assert finished(engine)["a"].error is None


def test_a_move_that_never_ends_is_begun_again_before_another_item_has_come(make, monkeypatch) -> None:
    engine, image, other = make(overlap=False), make_feature("cat", 0, 6), make_feature("dog", 8, 6)
    publish(STORE, image)
    engine.add(make_request("a", 20, [image, other], ready=[image.mm_hash]))
    plain, moved = engine.worker.start_load_caches, []

    def lose(metadata, cache) -> None:
        moved.extend(move.mm_hash for move in metadata.moves)
        if not metadata.moves:
            plain(metadata, cache)

    monkeypatch.setattr(engine.worker, "start_load_caches", lose)
    for _ in range(4):
        engine.step()
    assert moved == [image.mm_hash]
    engine.now += MOVE_TIMEOUT + 1
    engine.step()
    assert moved == [image.mm_hash] * 2


def test_a_load_that_the_store_does_not_answer_is_no_loss_and_its_request_goes_on_elsewhere(make):
    engine, image, other = make(), make_feature("cat", 2, 6), make_feature("dog", 2, 6)
    engine.add(make_request("a", 10, [image]), make_request("b", 10, [other], ready=[], arrival=1.0))
    output = engine.scheduler.schedule(engine.now)
    result = engine.run(output)
    failed = FailedLoad(image.mm_hash, "no answer", unreachable=True)
    result.ec_connector_output = ECConnectorOutput(failed=[failed])
    engine.events += engine.scheduler.update(output, result, engine.now)
    assert engine.of("item_missing") == []
    assert list(finished(engine)) == ["a"]
    assert isinstance(finished(engine)["a"].error, Unavailable)


def test_without_the_store_those_that_wait_for_an_embedding_end_and_all_others_go_on(make: Make) -> None:
    engine, image, other = make(), make_feature("cat", 2, 6), make_feature("dog", 2, 6)
    publish(STORE, image)
    engine.add(make_request("a", 10, [image], max_tokens=9), make_request("t", [3] * 4, max_tokens=9))
    for _ in range(4):
        engine.step()
    engine.add(make_request("b", 10, [other], ready=[], arrival=1.0))
    engine.add(make_request("again", 10, [image], arrival=2.0, max_tokens=9))
    engine.step()
    engine.scheduler.fail_unloaded()
    engine.step()
    assert list(finished(engine)) == ["b"]
    assert isinstance(finished(engine)["b"].error, Unavailable)
    engine.run_out()
    assert {name: end.error for name, end in finished(engine).items() if name != "b"} == {
        "a": None,
        "t": None,
        "again": None,
    }


def test_a_second_loss_is_reported_again(make: Make) -> None:
    engine, image = make(), make_feature("cat", 2, 6)
    engine.add(make_request("a", 10, [image]))
    for _ in range(2):
        for _ in range(4):
            engine.step()
        engine.scheduler.mark_ready([image.mm_hash], engine.now)
    assert names(engine.of("item_missing")) == ["a", "a"]


def test_a_mark_is_worth_nothing_once_the_item_is_lost(make: Make) -> None:
    engine, image = make(), make_feature("cat", 2, 6)
    engine.scheduler.mark_ready([image.mm_hash], engine.now)
    engine.add(make_request("a", 10, [image]))
    for _ in range(4):
        engine.step()
    engine.add(make_request("b", 10, [image], ready=[], arrival=1.0))  # its item is being encoded
    for _ in range(4):
        engine.step()
    assert names(engine.of("item_missing")) == ["a"]
    engine.arrive(image)
    engine.run_out()


def test_an_item_that_another_request_made_resident_costs_no_load(make: Make) -> None:
    engine, image = make(), make_feature("cat", 2, 6)
    publish(STORE, image)
    engine.add(make_request("a", 10, [image]))
    engine.run_out()
    STORE.clear()
    engine.add(make_request("b", [4, 4, *range(8)], [image]))
    engine.run_out()
    assert finished(engine)["b"].error is None
    assert names(engine.of("item_loaded")) == ["a", "b"]


def test_a_request_is_told_once_that_its_item_has_come(make: Make) -> None:
    engine, image = make(overlap=False), make_feature("cat", 4, 12)
    publish(STORE, image)
    engine.add(make_request("a", 36, [image]))
    engine.step()
    output = engine.scheduler.schedule(engine.now)
    result = engine.run(output)
    result.ec_connector_output = ECConnectorOutput(fetched={image.mm_hash: 0.5}, loaded=[image.mm_hash])
    engine.events += engine.scheduler.update(output, result, engine.now)
    assert names(engine.of("item_loaded")) == ["a"]
    engine.run_out()
    assert names(engine.of("item_loaded")) == ["a"]


def test_a_prefix_hit_over_a_whole_item_needs_no_embedding(make: Make) -> None:
    engine, image = make(capacity=16 * 6), make_feature("cat", 2, 6)
    publish(STORE, image)
    engine.add(make_request("a", 12, [image]))
    engine.run_out()
    other = make_feature("dog", 0, 6)
    publish(STORE, other)
    engine.add(make_request("evictor", [1] * 8, [other]))
    engine.run_out()
    assert image.mm_hash not in engine.resident
    STORE.clear()
    engine.add(make_request("b", 12, [image], ready=[]))
    engine.run_out()
    assert finished(engine)["b"].cached_tokens == 8

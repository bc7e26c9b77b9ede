"""How requests of an encoder-decoder model come to their cross tables, without a model."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine.engine_requests import (
    STORE,
    WIDTH,
    Make,
    ModellessEngine,
    finished,
    make_cross,
    make_feature,
    make_request,
    publish,
)
from triptych.base.delta import Delta
from triptych.base.errors import InternalError, InvalidRequest
from triptych.base.types import FinishReason, MMFeature
from triptych.pd_worker.core.encoder_cache import Residency
from triptych.pd_worker.core.kv_cache.cross_kv_manager import TableState


@pytest.fixture
def make(make: Make) -> Make:
    """An encoder-decoder engine without a model over an empty store."""
    return partial(make, cross=True)


def stored(name: str, rows: int) -> MMFeature:
    feature = make_cross(name, rows)
    publish(STORE, feature)
    return feature


def reasons(engine: ModellessEngine) -> dict[str, FinishReason]:
    return {name: end.reason for name, end in finished(engine).items()}


def steps_to_chunks(engine: ModellessEngine) -> int:
    """Steps until one has a chunk, that one included."""
    for count in range(1, 10):
        if engine.step().chunks:
            return count
    raise AssertionError("no chunk")


def test_a_request_starts_in_the_step_after_its_projection(make: Make) -> None:
    engine = make()
    engine.add(make_request("a", [2, 0], [stored("text", 9)], max_tokens=3))
    outputs = engine.run_out()
    projecting = next(i for i, output in enumerate(outputs) if output.projections)
    assert [len(output.chunks) for output in outputs[projecting : projecting + 2]] == [0, 1]
    (projection,) = outputs[projecting].projections
    assert (projection.rows, len(projection.block_ids)) == (9, 3)
    assert all(output.chunks[0].cross_blocks == projection.block_ids for output in outputs[projecting + 1 :])


def test_the_embedding_is_let_go_once_it_is_projected(make: Make) -> None:
    engine = make()
    engine.add(make_request("a", [2, 0], [stored("text", 9)], max_tokens=9))
    steps_to_chunks(engine)
    assert engine.cache.references == 0
    assert engine.admission.reserved == 0
    assert engine.kv.num_used == 3 + 1


def test_three_requests_on_one_key_load_once_and_project_once(make: Make) -> None:
    engine, text = make(), stored("text", 9)
    engine.add(*(make_request(name, [2, 0], [text], max_tokens=4, arrival=i) for i, name in enumerate("abc")))
    outputs = [engine.step()]
    while not outputs[-1].chunks:
        outputs.append(engine.step())
    assert len(outputs[-1].chunks) == 3
    assert engine.kv.num_used == 3 + 3 * 1, "one cross table, three tables of their own"
    outputs += engine.run_out()
    assert sum(len(output.projections) for output in outputs) == 1
    assert sorted(event.request_id for event in engine.of("item_loaded")) == ["a", "b", "c"]


def test_a_table_in_use_needs_neither_store_nor_room(make: Make) -> None:
    engine, text = make(capacity=9 * WIDTH * 4), stored("text", 9)
    engine.add(make_request("a", [2, 0], [text], max_tokens=30))
    steps_to_chunks(engine)
    STORE.clear()
    other = make_cross("other", 9)
    engine.add(make_request("full", [2], [other], arrival=1.0, ready=[]))
    engine.step()
    assert engine.admission.reserved == engine.capacity
    engine.add(make_request("b", [2, 5], [text], max_tokens=1, arrival=2.0, ready=[]))
    assert [chunk.state.request.request_id for chunk in engine.step().chunks] == ["a", "b"]
    assert engine.of("item_missing") == []


def test_a_table_without_references_is_found_again(make: Make) -> None:
    engine, text = make(), stored("text", 9)
    engine.add(make_request("a", [2, 0], [text]))
    engine.run_out()
    STORE.clear()
    engine.add(make_request("b", [2, 5], [text], ready=[], arrival=1.0))
    outputs = engine.run_out()
    assert len(outputs) == 1 and outputs[0].projections == []


def test_a_table_whose_blocks_were_taken_is_projected_again(make: Make) -> None:
    engine, text = make(num_blocks=8), stored("text", 9)
    engine.add(make_request("a", [2, 0], [text]))
    engine.run_out()
    engine.add(make_request("b", 12, [stored("long", 15)], max_tokens=2, arrival=1.0))
    engine.run_out()
    assert engine.tables is not None and engine.tables.state(text.plan) is TableState.ABSENT
    engine.add(make_request("c", [2, 5], [text], arrival=2.0))
    assert sum(len(output.projections) for output in engine.run_out()) == 1
    assert set(reasons(engine).values()) == {FinishReason.LENGTH}


def test_a_request_that_was_let_in_for_a_table_asks_for_room_when_it_goes(make: Make) -> None:
    engine, text = make(num_blocks=8, max_num_seqs=1), stored("text", 9)
    engine.add(make_request("a", [2, 0], [text]))
    engine.run_out()
    engine.add(make_request("b", 12, [long := stored("long", 16)], max_tokens=4, arrival=1.0))
    while engine.cache.state(long.mm_hash) is not Residency.READY:
        engine.step()
    # The first takes the table's blocks in the step in which the second is let in for it.
    engine.add(make_request("c", [2, 5], [text], arrival=2.0))
    outputs = engine.run_out()
    assert sum(len(output.projections) for output in outputs) == 2
    assert reasons(engine)["c"] is FinishReason.LENGTH


def test_equal_decoder_prompts_over_different_texts_share_no_prefix(make: Make) -> None:
    engine, prompt = make(), list(range(9))
    cat, dog = stored("cat", 5), stored("dog", 5)
    for index, (name, text) in enumerate([("a", cat), ("b", dog), ("c", cat)]):
        engine.add(make_request(name, prompt, [text], arrival=index))
        engine.run_out()
    cached = {name: end.cached_tokens for name, end in finished(engine).items()}
    assert cached == {"a": 0, "b": 0, "c": 8}


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("marked", [True, False], ids=["stored", "never stored"])
def test_a_cancelled_request_frees_everything_at_every_stage(make: Make, steps: int, marked: bool) -> None:
    engine, text = make(budget=4), stored("text", 9)
    engine.add(make_request("a", 10, [text], max_tokens=3, ready=None if marked else []))
    for _ in range(steps):
        engine.step()
    engine.scheduler.cancel(["a"], "proxy")
    engine.scheduler.cancel(["a"], "proxy")
    engine.step()


def test_a_failed_projection_ends_all_requests_that_wait_for_it(make: Make) -> None:
    engine, text = make(), stored("text", 9)
    engine.add(make_request("a", [2], [text]), make_request("b", [3], [text], arrival=1.0))
    while not engine.step(error=RuntimeError("broken")).projections:
        pass
    assert set(reasons(engine).values()) == {FinishReason.ERROR}
    assert all(isinstance(end.error, InternalError) for end in finished(engine).values())
    engine.add(make_request("c", [2], [text], arrival=2.0))
    engine.run_out()
    assert reasons(engine)["c"] is FinishReason.LENGTH


def test_a_preempted_request_gives_its_table_up_and_gets_it_again(make: Make) -> None:
    engine = make(num_blocks=9, prefix_caching=False)
    for index, name in enumerate("ab"):
        engine.add(make_request(name, [2, 0], [stored(name, 7)], max_tokens=14, arrival=index))
    outputs = engine.run_out()
    assert any(output.preempted for output in outputs)
    assert [len(engine.kv.table(name)) for name in "ab"] == [0, 0]
    assert set(reasons(engine).values()) == {FinishReason.LENGTH}
    assert sum(isinstance(event, Delta) for event in engine.events) == 28


def test_another_plan_under_a_tables_key_is_refused(make: Make) -> None:
    engine, text = make(), stored("text", 9)
    engine.add(make_request("a", [2, 0], [text], max_tokens=9))
    steps_to_chunks(engine)
    engine.add(make_request("b", [2, 0], [make_cross("text", 8)], arrival=1.0))
    engine.step()
    assert reasons(engine) == {"b": FinishReason.ERROR}


@pytest.mark.parametrize(
    ("features", "words"),
    [
        ([], "exactly one encoder prompt"),
        ([make_cross("a", 3), make_cross("b", 3)], "exactly one encoder prompt"),
        ([make_feature("image", 0, 2)], "exactly one encoder prompt"),
        ([make_cross("a", 3, width=5)], "rows of 5"),
        ([make_cross("a", 65)], "the model takes 64"),
        ([make_cross("a", 60)], "need 16 KV blocks"),
    ],
)
def test_what_could_never_run_is_refused_by_name(make: Make, features: list[MMFeature], words: str) -> None:
    engine = make(num_blocks=15)
    with pytest.raises(InvalidRequest, match=words) as caught:
        engine.add(make_request("a", [2, 0], features))
    assert caught.value.param == "encoder_prompt"


def test_a_table_and_the_longest_output_have_to_fit_the_blocks_together(make: Make) -> None:
    engine = make(num_blocks=15)
    engine.add(make_request("a", [2, 0], [make_cross("a", 50)], max_tokens=6))
    with pytest.raises(InvalidRequest, match="50 encoder positions and 9 tokens need 16 KV blocks"):
        engine.add(make_request("b", [2, 0], [make_cross("a", 50)], max_tokens=7))


def test_a_decoder_only_model_takes_no_cross_item() -> None:
    engine = ModellessEngine(STORE)
    with pytest.raises(InvalidRequest, match="outside the prompt"):
        engine.add(make_request("a", [2, 0], [make_cross("text", 3)]))


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 1 << 30))
def test_no_block_is_lost_under_random_events(seed: int) -> None:
    rng = random.Random(seed)
    STORE.clear()
    engine = ModellessEngine(
        STORE,
        cross=True,
        num_blocks=rng.randint(14, 30),
        budget=rng.choice([3, 8, 32]),
        max_num_seqs=rng.choice([1, 2, 8]),
        capacity=rng.choice([20, 40]) * WIDTH * 4,
        prefix_caching=rng.random() < 0.7,
    )
    texts = [make_cross(f"text {i}", rng.randint(1, 20)) for i in range(3)]
    publish(STORE, *texts)
    alive: list[str] = []
    for number in range(rng.randint(1, 12)):
        name = f"r{number}"
        request = make_request(
            name, rng.randint(1, 12), [rng.choice(texts)], max_tokens=rng.randint(1, 12), arrival=number
        )
        engine.add(request)
        alive.append(name)
        for _ in range(rng.randint(0, 6)):
            engine.step()
            check_conservation(engine)
        if rng.random() < 0.3:
            engine.scheduler.cancel([rng.choice(alive)], "proxy")
            check_conservation(engine)
    engine.run_out()
    assert set(reasons(engine).values()) <= {FinishReason.LENGTH, FinishReason.ABORT}
    engine.assert_at_rest()


def check_conservation(engine: ModellessEngine) -> None:
    """Used blocks are those of the requests' own tables and of each key's table once."""
    running = engine.scheduler._running
    own = {block for state in running for block in engine.kv.table(state.request_id)}
    cross = {block for state in running for block in engine.tables.table(state.request_id)}
    assert not own & cross
    assert engine.kv.num_used == len(own) + len(cross)

"""State slots and snapshots of recurrent layers, as plain values."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine.engine_events import kind
from support.engine.engine_requests import ModellessEngine, finished, make_cross, make_request, publish
from triptych.base.errors import InternalError
from triptych.ec_connector.connectors.memory import MemoryStore
from triptych.pd_worker.core.kv_cache.cross_kv_manager import TableState
from triptych.pd_worker.core.kv_cache.state_slots import StateSlots, boundaries_of

A, B, C = b"a", b"b", b"c"


def kept(slots: StateSlots, *digests: bytes) -> StateSlots:
    for digest in digests:
        assert slots.begin(digest) is not None
        slots.commit(digest)
    return slots


def test_a_request_gets_a_slot_of_its_own_and_none_when_all_are_held():
    slots = StateSlots(2)
    assert slots.acquire("a") and slots.acquire("b")
    assert not slots.acquire("c")
    assert {slots.slot("a"), slots.slot("b")} == {0, 1}
    slots.release("a")
    slots.release("a")
    assert slots.num_used == 1
    assert slots.acquire("c")


def test_a_snapshot_is_read_only_once_its_chunk_is_computed():
    slots = StateSlots(1, 1)
    assert slots.begin(A) == 1, "behind the requests' slots"
    assert slots.longest([A]) == 0
    slots.end_step()
    slots.commit(A)
    assert slots.longest([A]) == 0, "the step ended without it"
    assert kept(slots, A).longest([A]) == 1


def test_a_prefix_ends_at_its_last_snapshot():
    slots = kept(StateSlots(1, 2), B)
    assert slots.longest([A, B, C]) == 2
    assert slots.longest([A]) == 0


def test_the_snapshot_that_is_used_least_recently_gives_way():
    slots = kept(StateSlots(1, 2), A, B)
    assert slots.begin(A) is None, "it is there"
    slots.restore(A)
    kept(slots, C)
    assert [slots.longest([digest]) for digest in (A, B, C)] == [1, 0, 1]
    assert slots.drain_changes() == {A, B, C}


def test_no_snapshot_gives_way_to_one_that_is_still_written():
    slots = StateSlots(1, 1)
    assert slots.begin(A) is not None
    assert slots.begin(A) is None
    assert slots.begin(B) is None
    assert StateSlots(1).begin(A) is None


def test_a_snapshot_goes_with_its_block():
    slots = kept(StateSlots(1, 2), A, B)
    slots.drop([A, C])
    assert slots.snapshots_used == 1
    slots.reset()
    assert slots.snapshots_used == 0
    assert kept(slots, A, B).snapshots_used == 2


@pytest.mark.parametrize(
    ("start", "end", "kept"), [(0, 32, [8, 16]), (8, 32, [16]), (16, 32, []), (0, 6, []), (0, 8, [8])]
)
def test_a_chunk_keeps_the_states_behind_its_own_tokens(start, end, kept):
    slots = StateSlots(1, 1)
    slots.acquire("a", (8, 16))
    assert slots.kept_in("a", start, end) == kept


@pytest.mark.parametrize(
    ("num_prompt", "computed", "shared", "boundaries"),
    [
        (64, 0, 0, (60,)),
        (65, 0, 0, (64,)),
        (65, 0, 32, (32, 64)),
        (65, 32, 40, (64,)),  # less than a few blocks behind what is there
        (65, 0, 80, (64,)),  # an output computed before is no part of a prompt
        (17, 0, 0, (16,)),
        (16, 0, 0, ()),
        (65, 64, 64, ()),
    ],
)
def test_the_state_is_kept_at_a_prompts_last_full_block_and_where_it_parts_from_another(
    num_prompt, computed, shared, boundaries
):
    assert boundaries_of(num_prompt, 4, computed, shared) == boundaries


@pytest.mark.parametrize(
    ("num_prompt", "computed", "ends", "boundaries"),
    [
        (65, 0, (40,), (40, 64)),
        (65, 0, (42,), (40, 64)),  # the last block that ends in the item
        (65, 0, (52,), (52,)),  # in place of the prompt's end, which is near
        (65, 0, (64,), (64,)),
        (65, 0, (12,), (64,)),  # little to compute again
        (65, 52, (52,), ()),
        (65, 36, (52,), (52,)),
        (300, 0, (70, 150, 290), (68, 148, 288)),
        (300, 0, (200, 220, 290), (220, 288)),  # those before the last are further apart
        (1000, 0, (100, 300, 400, 500, 600, 990), (400, 500, 600, 988)),  # only the last ones
    ],
)
def test_the_state_is_kept_behind_items_too(num_prompt, computed, ends, boundaries):
    assert boundaries_of(num_prompt, 4, computed, computed, ends) == boundaries


def test_a_worker_whose_prompts_others_take_over_keeps_their_end_too():
    assert boundaries_of(65, 4, 0, 0, (52,), keeps_end=True) == (52, 64)


@given(
    prompt=st.integers(1, 400),
    computed=st.integers(0, 100),
    shared=st.integers(0, 100),
    ends=st.lists(st.integers(1, 400), max_size=20),
)
def test_snapshots_are_few_and_where_blocks_of_the_prompt_end(prompt, computed, shared, ends):
    found = boundaries_of(prompt, 4, computed * 4, shared * 4, [min(end, prompt) for end in sorted(ends)])
    assert len(found) <= 6 and list(found) == sorted(set(found))
    assert all(at % 4 == 0 and computed * 4 < at < prompt for at in found)


STORE = MemoryStore()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40), prompt=st.integers(1, 20), block_size=st.integers(1, 9), users=st.integers(1, 4)
)
def test_users_of_one_output_take_its_table_once_and_their_own_each(rows, prompt, block_size, users):
    STORE.clear()
    text = make_cross("text", rows)
    publish(STORE, text)
    engine = ModellessEngine(
        STORE, cross=True, block_size=block_size, num_blocks=256, budget=512, prefix_caching=False
    )
    names = [f"r{number}" for number in range(users)]
    requests = [
        make_request(name, prompt, [text], max_tokens=60, arrival=number) for number, name in enumerate(names)
    ]
    engine.add(*requests)
    while not engine.step().chunks:
        assert engine.kv.num_free > 0
    cross, own = -(-rows // block_size), -(-prompt // block_size)
    assert engine.kv.num_used == cross + users * own
    assert engine.kv.num_free == 256 - cross - users * own
    for left in range(users - 1, -1, -1):
        engine.scheduler.cancel([names[left]], "proxy")
        assert engine.kv.num_used == (cross + left * own if left else 0)
        # What was given back is not given back again.
        engine.scheduler.cancel([names[left]], "proxy")
        for state_id in (names[left], f"proxy/{names[left]}/1"):
            engine.kv.free(state_id)
            engine.tables.release(state_id)
        assert engine.kv.num_used == (cross + left * own if left else 0)
    assert engine.kv.num_free == 256
    engine.assert_at_rest()
    STORE.clear()


def test_a_reset_brings_the_totals_of_both_devices_back() -> None:
    STORE.clear()
    text = make_cross("text", 6)
    publish(STORE, text)
    engine = ModellessEngine(STORE, cross=True, num_blocks=12, host_blocks=12, max_num_seqs=2, budget=64)
    prompts = [make_request(f"r{i}", [9] * 8, [text], max_tokens=24, arrival=i) for i in range(2)]
    engine.add(*prompts)
    while not engine.swap.num_used:
        engine.step()
    # As an error in the middle of the bookkeeping would leave them.
    engine.kv.pool.allocate()
    events = engine.scheduler.reset(InternalError("lost"))
    assert {event.request_id for event in events if kind(event) == "finished"} >= {"r1"}
    assert (engine.kv.num_free, engine.swap.num_free) == (12, 12)
    assert engine.tables is not None and engine.tables.num_tables == 0
    assert engine.tables.state(text.plan) is TableState.ABSENT
    engine.add(make_request("again", [9] * 8, [text], max_tokens=2, arrival=9))
    engine.run_out()
    again = finished(engine)["again"]
    assert again.error is None and again.cached_tokens == 0
    engine.assert_at_rest()
    STORE.clear()

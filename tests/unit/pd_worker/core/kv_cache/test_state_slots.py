"""State slots and snapshots of recurrent layers, as plain values."""

from __future__ import annotations

import pytest

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


def test_a_chunk_ends_where_the_state_is_kept():
    slots = StateSlots(1, 1)
    slots.acquire("a", (8, 16))
    assert [slots.cut("a", *span) for span in ((0, 32), (8, 32), (16, 32), (0, 6), (0, 8))] == [
        8,
        16,
        32,
        6,
        8,
    ]


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

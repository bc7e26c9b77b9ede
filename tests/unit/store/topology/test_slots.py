"""Slot maps of a Redis Cluster."""

from __future__ import annotations

import pytest

from triptych.registry import leases, registry, scaling
from triptych.store import keys
from triptych.store.topology.slots import SLOTS, SlotMap, key_of, slot_of

HASH = "ab" * 32
ROWS = [
    [0, 5460, [b"10.0.0.1", 6379, b"id"], [b"10.0.0.9", 6379, b"id"]],
    [5461, 16383, [b"", 7000, b"id"]],
]


def test_a_map_names_the_primary_of_each_slot() -> None:
    made = SlotMap.parse(ROWS, "asked")
    assert made.owner(0) == made.owner(5460) == ("10.0.0.1", 6379)
    assert made.owner(5461) == ("asked", 7000), "a server that does not know its own host"
    assert made.parts() == {("10.0.0.1", 6379): 5461 / SLOTS, ("asked", 7000): 10923 / SLOTS}


def test_a_moved_slot_has_another_owner() -> None:
    made = SlotMap.parse(ROWS, "asked")
    made.move(7, ("new", 1))
    assert made.owner(7) == ("new", 1)
    assert made.owner(8) == ("10.0.0.1", 6379)
    made.move(SLOTS, ("new", 1))


def test_slots_without_a_server_have_no_owner() -> None:
    assert SlotMap.parse(ROWS[:1], "asked").owner(6000) is None
    assert SlotMap([]).owner(0) is None


@pytest.mark.parametrize("rows", [[[0, 20000, [b"h", 1]]], [[b"0", 1, [b"h", 1]]], [[0, 1, b"h"]]])
def test_another_reply_is_refused(rows: list[list[object]]) -> None:
    with pytest.raises(ValueError):
        SlotMap.parse(rows, "asked")


def test_all_keys_of_an_item_are_in_one_slot() -> None:
    assert slot_of(keys.embedding(HASH)) == slot_of(keys.part(HASH, "0011", 3)) == slot_of(f"{{{HASH}}}")
    assert slot_of("foo") == 12182, "as the servers compute it"


@pytest.mark.parametrize(
    "names",
    [
        leases.KEYS,
        [*registry.WORKER_KEYS, keys.PROXIES, keys.EPOCH],
        scaling.DECISION_KEYS,
        keys.demands("encoder"),
    ],
)
def test_the_keys_of_each_script_are_in_one_slot(names: list[str]) -> None:
    assert len({slot_of(name) for name in names}) == 1


def test_the_key_of_a_command_is_found() -> None:
    assert key_of(("EVAL", "text", 2, "a", "b", "argument")) == "a"
    assert key_of(("EVAL", "text", 0, "argument")) is None
    assert key_of(("GETRANGE", "a", 0, 1)) == "a"
    assert key_of(("PING",)) is None
    assert key_of(("INFO", "memory")) is None

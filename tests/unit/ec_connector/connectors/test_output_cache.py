"""The worker's encoder cache: bounded in bytes, held entries stay."""

from __future__ import annotations

import torch

from triptych.base.types import ItemPlan
from triptych.ec_connector.base import EncoderOutput
from triptych.ec_connector.connectors.memory_store import OutputCache


def output(key: str, rows: int = 1) -> EncoderOutput:
    plan = ItemPlan(key, "n" * 64, "image", rows, 4, "float32", rows)
    return EncoderOutput(plan, torch.zeros(rows, 4))


def test_the_least_recently_used_output_goes_first() -> None:
    cache = OutputCache(32)
    cache["a"], cache["b"] = output("a"), output("b")
    assert cache["a"].plan.mm_hash == "a"
    cache["c"] = output("c")
    assert list(cache) == ["a", "c"]
    assert cache.nbytes == 32


def test_a_held_output_stays_until_it_is_let_go() -> None:
    cache = OutputCache(16)
    cache["a"] = output("a")
    cache.pin("a")
    cache["b"] = output("b")
    assert list(cache) == ["a"]
    cache.pin("a")
    cache.unpin("a")
    cache["c"] = output("c", rows=2)
    assert list(cache) == ["a"]
    cache.unpin("a")
    cache["d"] = output("d")
    assert list(cache) == ["d"]


def test_a_new_output_takes_the_place_of_the_old_one() -> None:
    cache = OutputCache(64)
    cache["a"] = output("a")
    cache["a"] = output("a", rows=2)
    assert (len(cache), cache.nbytes) == (1, 32)
    del cache["a"]
    assert cache.nbytes == 0
    assert cache.get("a") is None


def test_making_room_ends_though_everything_is_held_and_asking_for_nothing_changes_nothing() -> None:
    cache = OutputCache(16)
    cache["a"] = output("a")
    cache.pin("a")
    cache["b"] = output("b", rows=9)
    assert cache.get("missing") is None
    cache.unpin("a")
    assert list(cache) == ["a"]

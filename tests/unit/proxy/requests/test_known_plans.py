"""Which items of a request a PD worker may hold, by the plans and prefixes that are known."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from triptych.base.types import ItemPlan
from triptych.proxy.media.ports import ItemMedia
from triptych.proxy.requests.known_plans import KnownPlans, expected_plans
from triptych.proxy.splitter import SplitItem


def plan(key: str) -> ItemPlan:
    return ItemPlan(key, "n", "image", 1, 1, "float32", 1)


def item(key: str, prefix: int) -> SplitItem:
    return SplitItem(key, cast(ItemMedia, None), "", {}, prefix=prefix)


def known(*keys: str) -> KnownPlans:
    plans = KnownPlans()
    for key in keys:
        plans.add(plan(key))
    return plans


def test_items_of_known_prefixes_are_expected_and_later_ones_are_not() -> None:
    items = [item("a", 0), item("b", 2), item("c", 4)]
    found = expected_plans(items, {"a", "b", "c"}, known("a", "b", "c"), 3)
    assert found == {"a": plan("a"), "b": plan("b")}


def test_an_item_without_a_known_plan_has_to_be_encoded() -> None:
    assert expected_plans([item("a", 0), item("b", 0)], {"a", "b"}, known("b"), 1) == {"b": plan("b")}


def test_an_item_that_is_stored_is_not_expected() -> None:
    assert expected_plans([item("a", 0)], set(), known("a"), 1) == {}


def test_a_picture_that_comes_again_after_the_known_prefixes_has_to_be_encoded() -> None:
    assert expected_plans([item("a", 0), item("a", 2)], {"a"}, known("a"), 2) == {}


def test_the_plans_used_least_recently_are_forgotten() -> None:
    plans = KnownPlans(capacity=3)
    for key in ("a", "b", "c", "a", "d"):
        plans.add(plan(key))
    assert [key for key in "abcd" if plans.get(key)] == ["a", "c", "d"]


def test_plans_of_many_stretches_take_the_room_of_many() -> None:
    plans = KnownPlans(capacity=10)
    long = replace(plan("long"), runs=tuple((index * 2, 1) for index in range(8)))
    for one in (plan("a"), long, plan("b")):
        plans.add(one)
    assert [key for key in ("a", "long", "b") if plans.get(key)] == ["long", "b"]
    plans.add(long)  # the same one again takes no room twice
    assert len(plans) == 2

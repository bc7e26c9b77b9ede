"""Which items of a request a PD worker may hold, by the prefixes that it has had."""

from __future__ import annotations

from typing import cast

from triptych.proxy.media.source import ItemMedia
from triptych.proxy.requests.item_supply import held_keys
from triptych.proxy.splitter import SplitItem


def item(key: str, prefix: int) -> SplitItem:
    return SplitItem(key, cast(ItemMedia, None), "", {}, prefix=prefix)


def test_items_of_known_prefixes_may_be_held_and_later_ones_are_not() -> None:
    items = [item("a", 0), item("b", 2), item("c", 4)]
    assert held_keys(items, ["a", "b", "c"], 3) == {"a", "b"}


def test_nothing_is_held_where_no_prefix_is_known() -> None:
    assert held_keys([item("a", 0)], ["a"], 0) == set()


def test_an_item_that_is_stored_is_not_asked_for() -> None:
    assert held_keys([item("a", 0)], [], 1) == set()


def test_a_picture_that_comes_again_after_the_known_prefixes_has_to_be_encoded() -> None:
    assert held_keys([item("a", 0), item("a", 2)], ["a"], 2) == set()

from __future__ import annotations

import pytest

from triptych.base.types import ItemPlan
from triptych.proxy.encoders import recent_items
from triptych.proxy.encoders.recent_items import KEPT_SECONDS, RecentItems
from triptych.proxy.ports import JobReady


def end(mm_hash: str) -> JobReady:
    plan = ItemPlan(mm_hash, "n" * 64, "image", 4, 8, "float32", 4)
    return JobReady(plan, already_stored=False, encode_seconds=0.1, save_seconds=0.1)


def test_an_item_that_landed_during_a_look_up_is_found_and_an_older_one_is_not() -> None:
    items = RecentItems()
    items.add("a", end("a"), 10.0)
    assert items.published_since("a", 10.0) is not None
    assert items.published_since("a", 10.1) is None
    assert items.published_since("b", 0.0) is None


def test_items_are_forgotten_after_a_minute_however_few_they_are() -> None:
    items = RecentItems()
    items.add("a", end("a"), 0.0)
    items.add("b", end("b"), KEPT_SECONDS)
    assert len(items) == 2
    items.add("c", end("c"), KEPT_SECONDS + 1)
    assert items.published_since("a", 0.0) is None
    assert len(items) == 2


def test_an_item_that_lands_again_is_as_young_as_its_last_landing() -> None:
    items = RecentItems()
    items.add("a", end("a"), 0.0)
    items.add("b", end("b"), 1.0)
    items.add("a", end("a"), KEPT_SECONDS)
    items.add("c", end("c"), KEPT_SECONDS + 2)
    assert items.published_since("a", KEPT_SECONDS) is not None
    assert items.published_since("b", 1.0) is None


def test_a_flood_in_one_minute_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_items, "KEPT_ITEMS", 3)
    items = RecentItems()
    for number in range(5):
        items.add(str(number), end(str(number)), float(number))
    assert len(items) == 3
    assert items.published_since("1", 0.0) is None
    assert items.published_since("2", 0.0) is not None

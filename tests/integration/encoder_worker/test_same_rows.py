"""Rows of equal frames, found by their content in a real store."""

import dataclasses

import pytest
import torch

from support.data.items import make_body, make_plan
from triptych.encoder_worker.jobs.same_rows import SameRows
from triptych.models.base import PreparedItem
from triptych.store.embedding_store import EmbeddingStore

FIRST = make_plan(rows=2, width=4)
SECOND = dataclasses.replace(FIRST, mm_hash="9" * 64)


def prepared(pixel: int) -> PreparedItem:
    return PreparedItem(2, 2, (1, 1, 2), 1, {"pixels": torch.full((4,), pixel, dtype=torch.uint8)})


@pytest.fixture
async def same(store: EmbeddingStore) -> SameRows:
    """The first item has been encoded and saved."""
    same = SameRows(store, ttl=60.0)
    assert await same.output(FIRST, prepared(1), "a") is None
    await store.save(FIRST, make_body(FIRST), ttl=60)
    return same


async def test_an_item_of_equal_content_has_the_rows_that_are_stored(same: SameRows) -> None:
    output = await same.output(SECOND, prepared(1), "a")
    assert output is not None and output.plan == SECOND
    assert output.data.contiguous().flatten().view(torch.uint8).numpy().tobytes() == bytes(make_body(FIRST))


@pytest.mark.parametrize(("pixel", "salt"), [(2, "a"), (1, "b")], ids=["other content", "other tenant"])
async def test_other_items_have_none(same: SameRows, pixel: int, salt: str) -> None:
    assert await same.output(SECOND, prepared(pixel), salt) is None


async def test_an_item_whose_rows_are_gone_is_computed_and_is_the_one_to_read_then(same, store):
    await store.control.execute("FLUSHDB")
    assert await same.output(SECOND, prepared(1), "a") is None
    await store.save(SECOND, make_body(SECOND), ttl=60)
    assert await same.output(FIRST, prepared(1), "a") is not None


async def test_an_error_of_the_search_leaves_the_item_to_the_tower(same, store, monkeypatch):
    def broken(*args: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(store, "load", broken)
    assert await same.output(SECOND, prepared(1), "a") is None

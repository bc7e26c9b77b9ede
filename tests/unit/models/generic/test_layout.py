"""An item's layout as counts, and counts that are none."""

from __future__ import annotations

import pytest
import torch

from triptych.base.errors import InvalidRequest
from triptych.models.generic.layout import ItemLayout


def test_a_layout_comes_back_from_its_counts() -> None:
    layout = ItemLayout(
        (7, 9, 9, 9, 8, 9, 9),
        ((0,), (1,), (1,), (1,), (0,), (1,), (1,)),
        {1: torch.tensor([[1, 4, 6]])},
        head=(10, 10),
        tail=(11,),
    )
    counts = layout.encode()
    back = ItemLayout.decode(counts)
    assert (back.tokens, back.types, back.head, back.tail) == (layout.tokens, layout.types, (10, 10), (11,))
    assert list(back.grids) == [1]
    assert torch.equal(back.grids[1], layout.grids[1])
    assert min(counts) >= 0


def test_equal_tokens_with_equal_types_are_one_run() -> None:
    many = ItemLayout((5, *[9] * 1000, 6), ((0,), *[(1,)] * 1000, (0,)))
    assert len(many.encode()) < 16
    assert ItemLayout.decode(many.encode()).tokens == many.tokens


@pytest.mark.parametrize(
    "counts",
    [(), (1,), (0, 0, 1, 0, 2, 4, 4), (0, 0, 0, 0, 5), (0, 0, 0, 0, 5, 1 << 30), (0, 0, 1, 0, 1, 1 << 40)],
)
def test_counts_that_are_no_layout_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match="layout"):
        ItemLayout.decode(counts)

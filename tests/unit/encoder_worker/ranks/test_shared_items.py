"""Prepared items cross to another rank unchanged, and embeddings come back in their places."""

from __future__ import annotations

import os

import pytest
import torch

from triptych.encoder_worker.ranks.shared_items import share, shared
from triptych.models.base import PreparedItem


def _item(rows: int, *, runs: tuple[tuple[int, int], ...] | None = None, **tensors: torch.Tensor):
    return PreparedItem(rows, rows + 2, (1, rows, 1), cost=rows, tensors=tensors, runs=runs)


def test_items_of_all_dtypes_and_shapes_cross_unchanged_and_their_rows_come_back():
    items = [
        _item(3, pixels=torch.randn(3, 5), mask=torch.tensor([True, False]), scalar=torch.tensor(7)),
        _item(1, runs=((0, 1), (4, 2)), pixels=torch.randn(6, 4).T, empty=torch.empty(0, 4)),
        _item(2, halves=torch.randn(3).to(torch.bfloat16), ids=torch.tensor([[1, 2]], dtype=torch.int32)),
    ]
    descriptor, description, rows = share(items, 4, torch.bfloat16)
    other = shared(descriptor, description)
    os.close(descriptor)
    for ours, theirs in zip(items, other.items, strict=True):
        assert (ours.rows, ours.length, ours.grid_thw, ours.cost, ours.runs) == (
            *(theirs.rows, theirs.length, theirs.grid_thw, theirs.cost, theirs.runs),
        )
        assert list(ours.tensors) == list(theirs.tensors)
        for name, tensor in ours.tensors.items():
            assert tensor.dtype == theirs.tensors[name].dtype
            assert torch.equal(tensor, theirs.tensors[name])
    assert [tuple(place.shape) for place in rows] == [(3, 4), (1, 4), (2, 4)]
    for number, place in enumerate(other.rows):
        place.fill_(number + 1)
    assert [place.unique().tolist() for place in rows] == [[1.0], [2.0], [3.0]]
    assert torch.equal(other.items[0].tensors["pixels"], items[0].tensors["pixels"]), (
        "no place is over another"
    )


def test_a_new_share_holds_nothing_of_an_earlier_one():
    for fill in (5.0, 0.0):
        descriptor, description, rows = share([_item(4)], 8, torch.float32)
        assert not rows[0].any()
        shared(descriptor, description).rows[0].fill_(fill)
        os.close(descriptor)


def test_a_dtype_that_is_not_shared_is_an_error_and_leaves_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TypeError, match="complex64"):
        share([_item(1, wave=torch.zeros(1, dtype=torch.complex64))], 4, torch.float32)
    assert len(os.listdir("/proc/self/fd")) == before

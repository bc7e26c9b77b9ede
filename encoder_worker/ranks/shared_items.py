"""Preprocessed items in memory that rank 0 shares with one other rank, and room for their embeddings.

An anonymous file per share of a batch, whose descriptor goes with the command: nothing is left over from an
earlier batch, and nothing of it is in a file system or limited by /dev/shm.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from triptych.base.ranks.channel import Message
from triptych.models.base import PreparedItem

_ALIGNMENT = 64
#: What prepared tensors and embeddings may be made of.
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
        *(torch.int64, torch.int32, torch.uint8, torch.bool),
    )
}


@dataclass(frozen=True, slots=True)
class SharedItems:
    """One share. `rows` are the embeddings' places, [rows, width] each, in the order of `items`."""

    items: list[PreparedItem]
    rows: list[torch.Tensor]


def share(
    items: Sequence[PreparedItem], width: int, dtype: torch.dtype
) -> tuple[int, Message, list[torch.Tensor]]:
    """Copies the items: (descriptor, description, places of the embeddings); the descriptor is the caller's.

    The places are valid without the descriptor, and zero until the other rank has written them.
    """
    layout = _Layout()
    described = [_described(item, layout) for item in items]
    rows = [layout.place(dtype, (item.rows, width)) for item in items]
    descriptor = os.memfd_create("prepared-items", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, layout.nbytes)
        memory = mmap.mmap(descriptor, layout.nbytes)
        for item, fields in zip(items, described, strict=True):
            for name, place in fields["tensors"]:
                _view(memory, place).copy_(item.tensors[name])
        return descriptor, {"items": described, "rows": rows}, [_view(memory, place) for place in rows]
    except BaseException:
        os.close(descriptor)
        raise


def shared(descriptor: int, description: Message) -> SharedItems:
    """The items that rank 0 has shared, without a copy; valid without the descriptor."""
    memory = mmap.mmap(descriptor, 0)
    items = [
        PreparedItem(
            rows=fields["rows"],
            length=fields["length"],
            grid_thw=tuple(fields["grid_thw"]),
            cost=fields["cost"],
            tensors={name: _view(memory, place) for name, place in fields["tensors"]},
            runs=None if fields["runs"] is None else tuple((start, n) for start, n in fields["runs"]),
            extra_rows=fields["extra_rows"],
        )
        for fields in description["items"]
    ]
    return SharedItems(items, [_view(memory, place) for place in description["rows"]])


class _Layout:
    """The layout of the shared memory: consecutive places as (offset, dtype, shape)."""

    def __init__(self) -> None:
        # At least one page: an empty file cannot be mapped.
        self.nbytes = _ALIGNMENT

    def place(self, dtype: torch.dtype, shape: Sequence[int]) -> list[object]:
        name = str(dtype).removeprefix("torch.")
        if name not in _DTYPES:
            raise TypeError(f"a tensor of {dtype} is not shared between ranks")
        offset = -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = offset + torch.Size(shape).numel() * dtype.itemsize
        return [offset, name, list(shape)]


def _described(item: PreparedItem, layout: _Layout) -> Message:
    return {
        "rows": item.rows,
        "length": item.length,
        "grid_thw": list(item.grid_thw),
        "cost": item.cost,
        "runs": item.runs,
        "extra_rows": item.extra_rows,
        "tensors": [[name, layout.place(t.dtype, t.shape)] for name, t in item.tensors.items()],
    }


def _view(memory: mmap.mmap, place: Sequence[object]) -> torch.Tensor:
    offset, name, shape = place
    assert isinstance(offset, int) and isinstance(name, str) and isinstance(shape, list)
    dtype, size = _DTYPES[name], torch.Size(shape)
    if not size.numel():
        return torch.empty(size, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=size.numel(), offset=offset).view(size)

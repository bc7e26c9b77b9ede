"""Rows in 8 bits: int8 elements, and behind each row the scales of its equal parts, float32.

A part is what one scale suits: the row, or each of its deepstack levels.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from triptych.base.types import DTYPE_BYTES, INT8, SCALE_BYTES, ItemPlan
from triptych.ec_connector.base import EncoderOutput

_LARGEST = 127
#: Of a part of zeros: nothing is divided by 0.
_LEAST_SCALE = 1e-30
#: Elements that are rounded at once: their float32 stay in a core's cache.
_PIECE = 256 << 10


def packed(rows: torch.Tensor, scales: int) -> torch.Tensor:
    """[rows, width] of floating point in 8 bits; a part with NaN or infinity has no finite scale."""
    count, width = rows.shape
    stored = torch.empty(count, width + SCALE_BYTES * scales, dtype=torch.int8, device=rows.device)
    for piece in _pieces(rows):
        parts = rows[piece].to(torch.float32, copy=True).view(-1, scales, width // scales)
        lowest, highest = parts.aminmax(dim=2, keepdim=True)
        scale = torch.maximum(-lowest, highest).div_(_LARGEST).clamp_min_(_LEAST_SCALE)
        stored[piece, :width] = parts.mul_(scale.reciprocal()).round_().view(-1, width)
        stored[piece, width:] = scale.view(-1, scales).view(torch.int8)
    return stored


def unpacked(stored: torch.Tensor, scales: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The rows of `packed` in `dtype`."""
    width = stored.shape[1] - SCALE_BYTES * scales
    rows = torch.empty(len(stored), width, dtype=dtype, device=stored.device)
    # A copy: where a row's scales lie, no float32 may.
    scale = stored[:, width:].clone(memory_format=torch.contiguous_format).view(torch.float32).unsqueeze(2)
    for piece in _pieces(rows):
        parts = stored[piece, :width].to(torch.float32).view(-1, scales, width // scales)
        rows[piece] = parts.mul_(scale[piece]).view(-1, width)
    return rows


def _pieces(rows: torch.Tensor) -> Iterator[slice]:
    """Whole rows, so many that their float32 stay in a core's cache; on a GPU all of them."""
    count, width = rows.shape
    step = max(1, _PIECE // max(width, 1)) if rows.is_cpu else max(count, 1)
    return (slice(first, first + step) for first in range(0, count, step))


def rows_of(output: EncoderOutput, first: int, count: int) -> torch.Tensor:
    """`count` rows of the output from `first` on, in floating point."""
    rows = output.data[first : first + count]
    return unpacked(rows, output.plan.scales) if output.plan.scales else rows


def as_stored(rows: torch.Tensor, plan: ItemPlan) -> torch.Tensor:
    """A tower's rows as the plan stores them; as they are where they are not of its shape."""
    fits = tuple(rows.shape) == (plan.rows, plan.width)
    return packed(rows, plan.scales) if plan.scales and fits else rows


def finite_scales(body: memoryview, plan: ItemPlan) -> bool:
    """Whether the scales in an item's bytes are finite, as they are where all of its elements were."""
    rows = np.frombuffer(body, dtype=np.uint8).reshape(plan.rows, plan.columns * DTYPE_BYTES[INT8])
    scales = np.ascontiguousarray(rows[:, plan.width :]).view("<f4")
    return bool(np.isfinite(scales).all())

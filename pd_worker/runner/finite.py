"""What a model computes must be numbers. One that overflows must not reach others through the KV cache.

A key or value that is none would: attention multiplies what it masks by zero, and zero times that is none
either. So everything in the cache is finite, always.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def spoiled_chunks(
    hidden: torch.Tensor, counts: Sequence[int], written: torch.Tensor | None = None
) -> list[int]:
    """Indices of the chunks, of `counts` tokens each, in whose rows of `hidden` [T, hidden] are other things.

    A value that is no number makes its own token's row none, since the token attends to itself. A key need
    not: with a score of -inf the token does not. `written` [T], where keys may overflow, says whose were
    finite.
    """
    if math.isfinite(float(hidden.sum(dtype=torch.float32))) and (written is None or bool(written.all())):
        return []
    finite = hidden.isfinite().all(-1)
    if written is not None:
        finite &= written
    return [index for index, part in enumerate(torch.split(finite, list(counts))) if not part.all()]


def check_projection(key: torch.Tensor, value: torch.Tensor) -> None:
    """ArithmeticError for cross keys or values that are no numbers."""
    if not (key.isfinite().all() and value.isfinite().all()):
        raise ArithmeticError("an encoder output's keys and values overflow: give a wider --dtype")

"""Key ranges: the keys that each query attends to, as first and last index.

Causal masks, sliding windows, lengths and atomic spans are all ranges: two numbers per query replace a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

#: Queries and keys of one block of a block mask.
BLOCK = 128


def whole_blocks(count: int) -> int:
    """`count` queries or keys rounded up to a multiple of BLOCK, at least two.

    torch.compile specializes a size of 1, which the number of blocks would have.
    """
    return max(2 * BLOCK, count + -count % BLOCK)


@dataclass(frozen=True, slots=True)
class KeyRanges:
    """Query i of sequence b, at position[b, i], sees keys [first[b, i], last[b, i]); int32 [B, Q]."""

    first: torch.Tensor
    last: torch.Tensor
    position: torch.Tensor

    def repeated(self, rows: int) -> KeyRanges:
        """The ranges [B, 1] expanded to [B, rows]."""
        return KeyRanges(*(part.expand(-1, rows) for part in (self.first, self.last, self.position)))

    def padded(self, batch: int, queries: int) -> KeyRanges:
        """[batch, queries]; padding attends to the first key only, so that its softmax is finite."""
        missing = (0, queries - self.first.shape[1], 0, batch - self.first.shape[0])
        return KeyRanges(
            F.pad(self.first, missing), F.pad(self.last, missing, value=1), F.pad(self.position, missing)
        )

    def blocks(self, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks of keys that some query of each block of queries attends to.

        Counts [B, 1, query blocks] and indices [B, 1, query blocks, key blocks], int32; of the indices only
        the first `count` are valid.
        """
        batch, queries = self.first.shape
        missing = (0, -queries % BLOCK)
        most = torch.iinfo(torch.int32).max
        first = F.pad(self.first, missing, value=most).view(batch, -1, BLOCK).amin(-1) // BLOCK
        last = -(-F.pad(self.last, missing).view(batch, -1, BLOCK).amax(-1) // BLOCK)
        order = torch.arange(-(-keys // BLOCK), dtype=torch.int32, device=first.device)
        indices = (first[:, None, :, None] + order).clamp(max=len(order) - 1)
        return (last - first)[:, None], indices


def of_decodes(lengths: torch.Tensor, window: int | None) -> KeyRanges:
    """[D, 1]: the last token of sequences of these `lengths` [D]."""
    last = lengths[:, None].int()
    first = torch.zeros_like(last) if window is None else (last - window).clamp(min=0)
    return KeyRanges(first, last, last - 1)


def of_chunk(
    start: int, end: int, window: int | None, atomic: Sequence[tuple[int, int]], device: torch.device
) -> KeyRanges:
    """[1, end - start]: tokens at positions [start, end); `atomic` spans attend both ways."""
    position = torch.arange(start, end, dtype=torch.int32, device=device)[None]
    last = position + 1
    first = torch.zeros_like(last) if window is None else (last - window).clamp(min=0)
    for begins, ends in atomic:
        inside = (position >= begins) & (position < ends)
        first = torch.where(inside, first.clamp(max=begins), first)
        last = torch.where(inside, last.clamp(min=min(ends, end)), last)
    return KeyRanges(first, last, position)


def of_rows(rows: torch.Tensor, queries: int) -> KeyRanges:
    """[B, queries]: all see the first `rows` [B] keys of their sequence."""
    last = rows[:, None].int().expand(-1, queries)
    zeros = torch.zeros_like(last)
    return KeyRanges(zeros, last, zeros)


def of_mask(mask: torch.Tensor, batch: int, queries: int) -> KeyRanges:
    """[batch, queries] of a bool mask, to be broadcast to [batch, any, queries, keys].

    A query's keys must be contiguous in it, and the same for all heads.
    """
    while mask.dim() < 4:
        mask = mask[None]
    seen = mask[:, 0].expand(batch, queries, -1)
    first = seen.int().argmax(-1).int()
    return KeyRanges(first, first + seen.sum(-1).int(), torch.zeros_like(first))

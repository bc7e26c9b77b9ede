"""Groups of decodes that are gathered together, which bounds the memory of a layer.

Decoding sequences attend in one call, over gathered keys and values that are padded to the longest sequence.
With one long sequence among many short ones every copy would be long, so the batch is split into groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from triptych.base.config import MIB


@dataclass(frozen=True, slots=True)
class GatherGroup:
    """Decodes [first, last) of the batch, gathered with `blocks` blocks each."""

    first: int
    last: int
    blocks: int


def gather_limit(device: torch.device) -> int:
    """Limit of the bytes that one layer gathers at a time; a single longer sequence is gathered alone.

    Larger on an accelerator, which is faster with fewer, larger calls.
    """
    return (64 if device.type == "cpu" else 256) * MIB


def plan_gathers(blocks: Sequence[int], most: int) -> list[GatherGroup]:
    """Groups of decodes with these numbers of blocks, in order: `most` blocks each, or one decode."""
    groups: list[GatherGroup] = []
    first, longest = 0, 0
    for index, count in enumerate(blocks):
        now = max(longest, count)
        if index > first and now * (index - first + 1) > most:
            groups.append(GatherGroup(first, index, longest))
            first, now = index, count
        longest = now
    if blocks:
        groups.append(GatherGroup(first, len(blocks), longest))
    return groups

"""Sizes of decode graphs: numbers of sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class DecodeSize:
    """A step of `batch` sequences, whose block tables hold up to `blocks` KV blocks each.

    `cross_blocks` are those of an encoder output; 0 for decoder-only models. Attention reads no more of a
    table than a sequence has, so that every size has tables for the longest.
    """

    batch: int
    blocks: int
    cross_blocks: int = 0


def decode_sizes(max_num_seqs: int, blocks: int, cross_blocks: int = 0) -> list[DecodeSize]:
    """All sizes that are captured, smallest first: powers of two of sequences, and the maximum."""
    return [DecodeSize(batch, blocks, cross_blocks) for batch in powers_of_two(1, max_num_seqs)]


def powers_of_two(first: int, last: int) -> list[int]:
    """`first`, twice as many, and so on below `last`, and `last`; alone where it is not above `first`."""
    powers = []
    while first < last:
        powers.append(first)
        first *= 2
    return [*powers, last]


def smallest_fit(sizes: Iterable[DecodeSize], needed: DecodeSize) -> DecodeSize | None:
    """The smallest size that holds `needed`: first of batches, then of tables; None where none does."""
    fitting = [
        size
        for size in sizes
        if size.batch >= needed.batch
        and size.blocks >= needed.blocks
        and size.cross_blocks >= needed.cross_blocks
    ]
    return min(fitting, default=None)


def shown(sizes: Sequence[DecodeSize]) -> str:
    """For logs and errors: how many, and up to what."""
    last = sizes[-1]
    cross = f" and {last.cross_blocks} of an encoder output" if last.cross_blocks else ""
    return f"{len(sizes)} sizes up to {last.batch} sequences of {last.blocks} blocks{cross}"

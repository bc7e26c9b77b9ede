"""Sizes of decode graphs: numbers of sequences, and widths of their block tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Tokens of the narrowest table: less is gathered too quickly to be worth a graph of its own.
_MIN_TOKENS = 256
#: Tokens of all tables of one size that may be padding. Above it a step takes longer to gather the next power
#: of two than to launch its operators one by one.
_MAX_TOKENS = 32768


@dataclass(frozen=True, slots=True, order=True)
class DecodeSize:
    """A step of `batch` sequences of up to `blocks` KV blocks each.

    `cross_blocks` are those of an encoder output; 0 for decoder-only models.
    """

    batch: int
    blocks: int
    cross_blocks: int = 0


def decode_sizes(
    max_num_seqs: int, blocks: int, block_size: int, *, cross_blocks: int = 0, whole: bool = False
) -> list[DecodeSize]:
    """All sizes that are captured, smallest first, up to _MAX_TOKENS; longer steps have no graph.

    Batches and widths are powers of two, and the maxima; `blocks` and `cross_blocks` are the maxima of one
    request. Both kinds of table share a width, each up to its own maximum. `whole`: every encoder output has
    all of its `cross_blocks`, so that none of them is padding.
    """
    widest = max(blocks, cross_blocks)
    widths = powers_of_two(-(-_MIN_TOKENS // block_size), widest)
    if whole:
        widths = [width for width in widths if width >= cross_blocks]
    return [
        DecodeSize(batch, min(width, blocks), min(width, cross_blocks))
        for batch in powers_of_two(1, max_num_seqs)
        for width in widths
        if batch * min(width, blocks if whole else widest) * block_size <= _MAX_TOKENS
    ]


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

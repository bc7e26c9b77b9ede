"""An item's layout: its placeholder's tokens, their types and its grids, as the counts of an ItemPlan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from triptych.base.errors import InvalidRequest

#: Added to the number of dimensions of a grid of float32, whose values are their bits.
_FLOATS = 16
#: Added to the number of grids of a segment that continues the one before it.
_CONTINUES = 1 << 16
_BITS = 0xFFFFFFFF


@dataclass(frozen=True)
class ItemLayout:
    """What a prompt needs of an item beside its rows.

    `tokens` is the placeholder; `types` has each token's types, one per name that the class takes. `grids`
    are the processor's tensors that decide positions, by their place among the names that the class takes.
    `head` and `tail` are ordinary tokens before and after it: text that may merge with its neighbours.
    A segment that `continues` a video stands behind the one before it, whose first one has the video's grids.
    """

    tokens: tuple[int, ...]
    types: tuple[tuple[int, ...], ...]
    grids: Mapping[int, torch.Tensor] = field(default_factory=dict)
    head: tuple[int, ...] = ()
    tail: tuple[int, ...] = ()
    continues: bool = False

    def encode(self) -> tuple[int, ...]:
        """As counts: head, tail, grids, the number of types, and runs of equal tokens and types."""
        counts = [len(self.head), *self.head, len(self.tail), *self.tail]
        counts.append(len(self.grids) + _CONTINUES * self.continues)
        for index, grid in sorted(self.grids.items()):
            floats = grid.is_floating_point()
            values = grid.float().view(torch.int32) & _BITS if floats else grid
            counts += [
                index,
                grid.dim() + _FLOATS * floats,
                *grid.shape,
                *map(int, values.flatten().tolist()),
            ]
        counts.append(len(self.types[0]) if self.types else 0)
        for (token, types), run in groupby(zip(self.tokens, self.types, strict=True)):
            counts += [token, *types, sum(1 for _ in run)]
        return tuple(counts)

    @classmethod
    def decode(cls, counts: Sequence[int], *, max_tokens: int = 1 << 20) -> ItemLayout:
        """InvalidRequest for counts that are no layout."""
        try:
            return cls._decode(iter(counts), max_tokens)
        except (StopIteration, RuntimeError, ValueError) as error:
            raise InvalidRequest("an item's layout is not one of this model's", param="items") from error

    @classmethod
    def _decode(cls, counts: Iterator[int], max_tokens: int) -> ItemLayout:
        head, tail = (tuple([next(counts) for _ in range(min(next(counts), max_tokens))]) for _ in range(2))
        grids = {}
        continues, count = divmod(next(counts), _CONTINUES)
        for _ in range(count):
            index = next(counts)
            floats, dims = divmod(next(counts), _FLOATS)
            shape = [next(counts) for _ in range(min(dims, 8))]
            if math.prod(shape) > max_tokens:
                raise ValueError("a grid too large")
            values = torch.tensor([next(counts) for _ in range(math.prod(shape))], dtype=torch.int64)
            grid = values.to(torch.int32).view(torch.float32) if floats else values
            grids[index] = grid.view(shape)
        width = next(counts)
        tokens: list[int] = []
        types: list[tuple[int, ...]] = []
        for token in counts:
            kinds = tuple([next(counts) for _ in range(width)])
            count = next(counts)
            if len(tokens) + count > max_tokens:
                raise ValueError("too many tokens")
            tokens += [token] * count
            types += [kinds] * count
        return cls(tuple(tokens), tuple(types), grids, head, tail, bool(continues))

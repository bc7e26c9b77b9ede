"""Skewed traces of items: popular and rare, small and large, cheap and dear to encode."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

#: Bytes of one row of an embedding: 2048 values of 16 bits.
_ROW = 4096
_KIB = 1024


@dataclass(frozen=True, slots=True)
class Item:
    """One item: the bytes of its embedding, and the seconds that encoding it takes."""

    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Shape:
    """How requests are spread. `fresh`: the part of all ranks that new items take every `period` seconds."""

    mix: str
    items: int = 2000
    requests: int = 20_000
    per_second: float = 20.0
    skew: float = 0.9
    fresh: float = 0.0
    period: float = 250.0


def picture(draw: random.Random) -> Item:
    """A picture of 256 to 16384 patches, four of which make a row: fixed, linear and square costs."""
    patches = 2 ** draw.uniform(8, 14)
    return Item(int(patches / 4) * _ROW, 0.004 + 8e-6 * patches + 1.2e-9 * patches**2)


def sound(draw: random.Random) -> Item:
    """A file of one to eight windows of 30 s, 1500 rows each: little work for many bytes."""
    windows = draw.randint(1, 8)
    return Item(windows * 1500 * _ROW, 0.006 + 0.012 * windows)


def text(draw: random.Random) -> Item:
    """A text for a text encoder: much work for few bytes."""
    tokens = draw.randint(16, 512)
    return Item(max(4 * _KIB, tokens * 2048), 0.010 + 3e-5 * tokens)


_MIXES = {"pictures": (picture,), "pictures, sounds and texts": (picture, picture, sound, text)}
MIXES = tuple(_MIXES)


class Trace:
    """Requests by time. The same for one shape and seed."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self._draw = random.Random(seed)
        self.items: list[Item] = [self._new() for _ in range(shape.items)]
        self._weights = list(accumulate((rank + 1) ** -shape.skew for rank in range(shape.items)))

    def _new(self) -> Item:
        return self._draw.choice(_MIXES[self.shape.mix])(self._draw)

    @property
    def nbytes(self) -> int:
        """Bytes of all items that are asked for at one time."""
        return sum(item.nbytes for item in self.items[: self.shape.items])

    def requests(self) -> Iterator[tuple[float, int]]:
        """Time and number of the item of each request."""
        shape = self.shape
        ranks = list(range(shape.items))
        now, renewed = 0.0, 0.0
        for _ in range(shape.requests):
            now += self._draw.expovariate(shape.per_second)
            if shape.fresh and now - renewed > shape.period:
                renewed = now
                self._renew(ranks)
            yield now, self._draw.choices(ranks, cum_weights=self._weights)[0]

    def _renew(self, ranks: list[int]) -> None:
        for rank in self._draw.sample(range(len(ranks)), int(len(ranks) * self.shape.fresh)):
            ranks[rank] = len(self.items)
            self.items.append(self._new())


def typical_density(items: Sequence[Item]) -> float:
    """Seconds of encoding for each byte of the middle item."""
    found = sorted(item.seconds / item.nbytes for item in items)
    return found[len(found) // 2]

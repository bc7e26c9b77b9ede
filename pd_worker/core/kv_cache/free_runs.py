"""Free blocks of unknown content, kept as runs of consecutive ids, so that a request's blocks are one run."""

from __future__ import annotations

from collections.abc import Iterable


class FreeRuns:
    """Runs [first, last) of blocks, no two of which touch; adding and taking cost the same for any number."""

    def __init__(self, count: int) -> None:
        """Blocks 0 to `count` - 1, as one run."""
        self._last: dict[int, int] = {}
        self._first: dict[int, int] = {}
        #: First blocks of runs by the bits of their length, as the keys of dicts: a set without an order
        #: would give other runs to equal requests.
        self._by_bits: list[dict[int, None]] = [{} for _ in range(count.bit_length() + 1)]
        #: The number of blocks, as `len` has it.
        self.count = 0
        if count:
            self._add(0, count)

    def __len__(self) -> int:
        """The number of blocks."""
        return self.count

    def add(self, blocks: Iterable[int]) -> None:
        """Adds blocks, none of which is there yet, and joins runs that touch."""
        first = last = -1
        for block in sorted(blocks):
            if block != last:
                if last >= 0:
                    self._add(first, last)
                first = block
            last = block + 1
        if last >= 0:
            self._add(first, last)

    def end_of(self, first: int) -> int | None:
        """Where the run ends that begins with this block; None where none does."""
        return self._last.get(first)

    def longest(self) -> tuple[int, int]:
        """A run of which no other is twice as long; KeyError when there is none."""
        for firsts in reversed(self._by_bits):
            if firsts:
                # The last one: the first of a dict is slow to find after many have left it.
                first, _ = firsts.popitem()
                firsts[first] = None
                return first, self._last[first]
        raise KeyError("no block is free")

    def take(self, run: int, first: int, last: int) -> range:
        """Takes blocks [first, last) of the run that begins with block `run`."""
        end = self._remove(run)
        if run < first:
            self._put(run, first)
        if last < end:
            self._put(last, end)
        self.count -= last - first
        return range(first, last)

    def _add(self, first: int, last: int) -> None:
        self.count += last - first
        before, behind = self._first.get(first), self._last.get(last)
        if before is not None:
            self._remove(before)
            first = before
        if behind is not None:
            self._remove(last)
            last = behind
        self._put(first, last)

    def _put(self, first: int, last: int) -> None:
        self._last[first], self._first[last] = last, first
        self._by_bits[(last - first).bit_length()][first] = None

    def _remove(self, first: int) -> int:
        last = self._last.pop(first)
        del self._first[last]
        del self._by_bits[(last - first).bit_length()][first]
        return last

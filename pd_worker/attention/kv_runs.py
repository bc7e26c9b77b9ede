"""Runs of KV blocks: stretches of a block table with consecutive ids.

The tokens of a run are one slice of the cache: attention reads them where they are, without a gathered copy
and without a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

#: Tokens per run, on average, from which on one call per run costs less than one over a gathered copy.
_LEAST_TOKENS = 64


class KVRun(NamedTuple):
    """Slots [first, last) of the cache: consecutive tokens of one sequence."""

    first: int
    last: int


def runs_of(table: Sequence[int], length: int, block_size: int) -> tuple[KVRun, ...]:
    """The runs of the first `length` tokens in the blocks of `table`, in the tokens' order."""
    count = -(-length // block_size)
    if not count:
        return ()
    first = table[0]
    if tuple(table[:count]) == tuple(range(first, first + count)):
        return (KVRun(first * block_size, first * block_size + length),)
    runs, start = [], 0
    for index in range(1, count + 1):
        if index == count or table[index] != table[index - 1] + 1:
            slot = table[start] * block_size
            runs.append(KVRun(slot, slot + min(index * block_size, length) - start * block_size))
            start = index
    return tuple(runs)


def attends_in_runs(runs: Sequence[KVRun]) -> bool:
    """Whether a sequence is attended to run by run; otherwise its blocks are scattered, and are gathered."""
    return len(runs) == 1 or sum(run.last - run.first for run in runs) >= _LEAST_TOKENS * len(runs) > 0


def last_tokens(runs: Sequence[KVRun], count: int) -> tuple[KVRun, ...]:
    """The runs of the last `count` tokens: what a sliding window sees of them."""
    kept: list[KVRun] = []
    for first, last in reversed(runs):
        if count <= 0:
            break
        kept.append(KVRun(max(first, last - count), last))
        count -= last - first
    return tuple(reversed(kept))

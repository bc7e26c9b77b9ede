"""Blocks of one table follow one another where possible, and what is cached stays as long as it can."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from triptych.pd_worker.core.kv_cache.block_pool import BlockPool, FreeRuns, place


def check(runs: FreeRuns, free: set[int]) -> None:
    found = set()
    for first, last in runs._last.items():
        assert first < last and runs._first[last] == first
        assert first - 1 not in free and last not in free, "runs that touch are joined"
        found |= set(range(first, last))
    assert found == free and len(runs) == len(free)
    if free:
        first, last = runs.longest()
        assert 2 * (last - first) > max(end - start for start, end in runs._last.items())


@pytest.mark.parametrize("seed", range(30))
def test_free_runs_are_the_free_blocks_and_never_touch(seed: int) -> None:
    draw = random.Random(seed)
    runs, free, used = FreeRuns(50), set(range(50)), set[int]()
    for _ in range(60):
        if free and draw.random() < 0.5:
            run, end = draw.choice(list(runs._last.items()))
            first = draw.randrange(run, end)
            taken = set(runs.take(run, first, draw.randrange(first, end) + 1))
            assert taken <= free
            free, used = free - taken, used | taken
        elif used:
            given = set(draw.sample(sorted(used), draw.randrange(1, len(used) + 1)))
            runs.add(given)
            free, used = free | given, used - given
        check(runs, free)
    assert runs.end_of(99) is None
    with pytest.raises(KeyError):
        FreeRuns(0).longest()


def test_a_run_begins_where_nobody_grows_or_leaves_half_of_the_room() -> None:
    assert place(10, 40, 6, grown_into=False) == 10
    assert place(10, 40, 6, grown_into=True) == 22
    assert place(10, 16, 6, grown_into=True) == 10


def count_runs(table: list[int]) -> int:
    return 1 + sum(after != before + 1 for before, after in pairwise(table))


def test_tables_that_grow_by_turns_stay_one_run_each() -> None:
    pool = BlockPool(1000)
    tables = [pool.allocate(20, grows=True) for _ in range(8)]
    for _ in range(30):
        for table in tables:
            table += pool.allocate(after=table[-1], grows=True)
    assert [count_runs(table) for table in tables] == [1] * 8
    assert len({block for table in tables for block in table}) == 8 * 50


def test_a_table_goes_on_behind_a_prefix_that_was_found() -> None:
    pool = BlockPool(100)
    former = pool.allocate(10, grows=True)
    digests = [bytes([block]) for block in former]
    pool.label(former, digests)
    pool.release(reversed(former))
    for block in former:
        pool.add_reference(block)
    assert count_runs([*former, *pool.allocate(5, after=former[-1])]) == 1


def test_the_oldest_are_evicted_first_and_no_block_too_many() -> None:
    """A full cache of scattered tables."""
    draw = random.Random(0)
    pool = BlockPool(800)
    blocks = pool.allocate(800)
    draw.shuffle(blocks)
    digests = [block.to_bytes(2, "big") for block in blocks]
    pool.label(blocks, digests)
    pool.release(blocks)
    needed = 0
    for _ in range(60):
        count = draw.choice([1, 1, 1, 12])
        needed += count
        assert len(pool.allocate(count, grows=True)) == count
        gone = [pool.find(digest) is None for digest in digests]
        assert gone == [True] * needed + [False] * (800 - needed), "the least recently used go first"
    assert pool.num_free == 800 - needed
    assert pool.drain_changes() >= set(digests[:needed])


def test_too_few_blocks_are_an_error_and_change_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(KeyError, match="3 blocks are wanted and 2 are free"):
        pool.allocate(3)
    assert pool.num_free == 2 and pool.allocate(2)


def test_evicted_blocks_go_to_the_next_table_in_the_order_of_their_ids() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    pool.label(blocks, [bytes([block]) for block in blocks])
    pool.release(reversed(blocks))
    assert pool.allocate(3) == sorted(blocks)[1:]
    assert pool.find(bytes([min(blocks)])) == min(blocks) and pool.num_free == 1

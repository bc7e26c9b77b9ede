"""Blocks of one table follow one another where possible, and what is cached stays as long as it can."""

from __future__ import annotations

import random

import pytest

from triptych.pd_worker.attention.metadata import runs_of
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
    return len(runs_of(table, len(table), 1))


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


@pytest.mark.parametrize("early", [0.0, 0.125, 0.5])
def test_no_more_is_evicted_early_than_allowed_and_the_oldest_first(early: float) -> None:
    """A full cache of scattered tables, the oldest of which go; without early eviction no block too many."""
    draw = random.Random(0)
    pool = BlockPool(800, evict_early=early)
    blocks = pool.allocate(800)
    draw.shuffle(blocks)
    digests = [block.to_bytes(2, "big") for block in blocks]
    pool.label(blocks, digests)
    pool.release(blocks)
    needed, most = 0, int(800 * early)
    for _ in range(60):
        count = draw.choice([1, 1, 1, 12])
        needed += count
        assert len(pool.allocate(count, grows=True)) == count
        gone = [pool.find(digest) is None for digest in digests]
        evicted = sum(gone)
        assert gone == [True] * evicted + [False] * (800 - evicted), "the least recently used go first"
        assert needed <= evicted <= needed + most
    assert pool.num_free == 800 - needed
    assert pool.drain_changes() >= set(digests[:needed])


def test_blocks_of_a_full_cache_are_runs_again() -> None:
    """Requests that grow by turns, whose blocks are cached when they end, for as long as evicts all twice."""
    size, draw = 3000, random.Random(1)
    pool, live, ended, found = BlockPool(size, evict_early=0.125), [], 0, []
    while ended < 150:
        while len(live) < 16:
            live.append((pool.allocate(draw.randrange(19, 38), grows=True), draw.randrange(2, 7)))
        for table, grown in list(live):
            if grown:
                table += pool.allocate(after=table[-1], grows=True)
            live.remove((table, grown))
            if grown:
                live.append((table, grown - 1))
                continue
            ended += 1
            pool.label(table, [f"{ended} {index}".encode() for index in range(len(table))])
            pool.release(reversed(table))
            if ended > 75:
                found.append(len(table) / count_runs(table))
    # Of 30 blocks on average; without early eviction 8 of them follow one another.
    assert sum(found) / len(found) > 16


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

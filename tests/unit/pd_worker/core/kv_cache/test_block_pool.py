"""A block has one table or none, and what is cached stays as long as it can."""

from __future__ import annotations

import random

import pytest

from triptych.pd_worker.core.kv_cache.block_pool import BlockPool


@pytest.mark.parametrize("seed", range(10))
def test_a_block_is_free_or_in_one_table(seed: int) -> None:
    draw, pool, tables = random.Random(seed), BlockPool(50), list[list[int]]()
    for _ in range(100):
        if tables and draw.random() < 0.5:
            pool.release(reversed(tables.pop(draw.randrange(len(tables)))))
        elif count := draw.randrange(pool.num_free + 1):
            table = pool.allocate(count)
            if draw.random() < 0.5:
                pool.label(table, [draw.randbytes(8) for _ in table])
            tables.append(table)
        held = [block for table in tables for block in table]
        assert len(held) == len(set(held)) == pool.num_used
        assert all(pool.is_free(block) == (block not in held) for block in range(50))


def test_a_freed_table_is_the_next_one_in_the_same_order() -> None:
    pool = BlockPool(8)
    first = pool.allocate(3)
    assert first == [0, 1, 2], "host blocks that follow one another are copied at once"
    pool.release(reversed(first))
    assert pool.allocate(5) == [0, 1, 2, 3, 4]


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
        assert len(pool.allocate(count)) == count
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

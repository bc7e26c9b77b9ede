"""Pages of a KV cache that are taken before blocks arrive."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

import pytest
import torch

from support.engine.engine_cell import Checkpoint, Prompt, engine_cell
from triptych.base.machine.pages import HUGE_PAGE
from triptych.models.geometry import KVShape
from triptych.pd_worker.attention.early_pages import CachePages, EarlyPages
from triptych.pd_worker.attention.metadata import PagedKVCache
from triptych.pd_worker.kv_sharing.kv_copier import KVCopier

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are Linux's")
BLOCKS = 512
MANY = 1 << 50


def cache(blocks: int = BLOCKS) -> PagedKVCache:
    """Two layers of different widths; 12 MiB of 512 blocks."""
    return PagedKVCache(
        num_layers=2, num_blocks=blocks, block_size=16, num_kv_heads=2, head_dim=64, dtype=torch.float32,
        device=torch.device("cpu"), kv_shapes=(KVShape(2, 64, 64), KVShape(1, 64, 64)),
    )  # fmt: skip


def taken(
    of: PagedKVCache, available: Callable[[], int] = lambda: MANY, reached: int = BLOCKS
) -> PagedKVCache:
    """The cache once its pages are taken as far as they are."""
    pages = EarlyPages(of.pools, available)
    pages.start()
    pages.reach(reached)
    assert pages.wait()
    pages.close()
    return of


def faults_of_a_write(into: PagedKVCache) -> int:
    """Pages that this thread waits for while it writes blocks that have arrived."""
    copier, blocks = KVCopier(into, None), range(0, len(into.keys[0]), 16)
    body = torch.ones((len(blocks), copier.rows.width)).view(torch.uint8)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    copier.put(blocks, body, range(len(blocks)))
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_blocks_that_arrive_are_written_without_waiting_for_pages() -> None:
    faults_of_a_write(cache())  # what a first call imports and allocates
    assert faults_of_a_write(cache()) > 0, "a cache that nobody has written has no pages"
    # One now and then is of the interpreter's own memory.
    assert min(faults_of_a_write(taken(cache())) for _ in range(4)) == 0


def test_the_memory_of_some_blocks_is_their_part_of_each_layer_and_head() -> None:
    of = cache()
    pages = CachePages(of.pools)
    assert pages.unit == HUGE_PAGE // (16 * 64 * 4)
    parts = [part[:, :, head] for part in (*of.keys, *of.values) for head in range(part.shape[2])]
    expected = {(part[32].data_ptr(), 16 * part[0].numel() * 4) for part in parts}
    assert set(pages.spans(32, 48)) == expected
    assert sum(nbytes for _, nbytes in pages.spans(0, 4 * BLOCKS)) == sum(pool.nbytes for pool in of.pools)


def test_pages_are_taken_for_one_huge_page_of_blocks_more_than_have_been_used() -> None:
    of = cache(8 * BLOCKS)
    pages = EarlyPages(of.pools, lambda: MANY)
    pages.start()
    for used, taken in ((0, BLOCKS), (1, 2 * BLOCKS), (BLOCKS, 2 * BLOCKS), (BLOCKS + 1, 3 * BLOCKS)):
        pages.reach(used)
        assert pages.wait()
        assert pages.taken == taken
    pages.reach(8 * BLOCKS)
    assert pages.wait()
    assert pages.taken == 8 * BLOCKS
    pages.close()


def test_a_closed_one_takes_no_more_and_nobody_waits_for_it() -> None:
    pages = EarlyPages(cache(8 * BLOCKS).pools, lambda: MANY)
    pages.start()
    assert pages.wait()
    pages.close()
    pages.close()
    pages.reach(8 * BLOCKS)
    assert pages.wait()
    assert pages.taken == BLOCKS


def test_one_that_cannot_ask_for_the_memory_ends_and_nobody_waits_for_it() -> None:
    def fails() -> int:
        raise OSError("no /proc")

    pages = EarlyPages(cache().pools, fails)
    pages.start()
    assert pages.wait(30.0)
    assert pages.taken == 0
    pages.close()


def test_what_is_written_meanwhile_stays() -> None:
    written = cache()
    for pool in written.pools:
        pool.fill_(3)
    assert all(bool((pool == 3).all()) for pool in taken(written).pools)


def test_memory_that_the_machine_is_short_of_is_left_to_others() -> None:
    left = iter([8 << 20, 4 << 20])
    assert faults_of_a_write(taken(cache(), lambda: next(left, 0))) > 0


def test_an_engine_has_pages_for_the_blocks_that_come_next() -> None:
    checkpoint = Checkpoint.open("qwen3_vl")
    with engine_cell(checkpoint, kv_memory=64 << 20) as cell:
        pages = cell.engine.pages
        assert pages is not None
        assert pages.wait()
        before = pages.taken
        assert 0 < before < cell.engine.scheduler.kv.pool.num_blocks
        cell.engine.scheduler.kv.pool.most_used = before
        cell.answer([Prompt("one word")], 2)
        assert pages.wait()
        assert pages.taken > before

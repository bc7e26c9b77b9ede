"""Pages of a KV cache that are taken before blocks arrive."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

import pytest
import torch

from support.engine.engine_cell import Checkpoint, engine_cell
from triptych.models.geometry import KVShape
from triptych.pd_worker.attention.metadata import PagedKVCache
from triptych.pd_worker.kv_sharing.early_pages import EarlyPages, spans
from triptych.pd_worker.kv_sharing.kv_copier import KVCopier

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are Linux's")
BLOCKS = 512
MANY = 1 << 50


def cache() -> PagedKVCache:
    """Two layers of different widths, 12 MiB."""
    return PagedKVCache(
        num_layers=2, num_blocks=BLOCKS, block_size=16, num_kv_heads=2, head_dim=64, dtype=torch.float32,
        device=torch.device("cpu"), kv_shapes=(KVShape(2, 64, 64), KVShape(1, 64, 64)),
    )  # fmt: skip


def taken(of: PagedKVCache, available: Callable[[], int] = lambda: MANY) -> PagedKVCache:
    """The cache once its pages are taken as far as they are."""
    pages = EarlyPages(of.pools, available)
    pages.start()
    pages.wait()
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


def test_all_memory_is_taken_once_and_that_of_the_first_blocks_first() -> None:
    pools = cache().pools
    found = list(spans(pools))
    assert sum(nbytes for _, nbytes in found) == sum(pool.nbytes for pool in pools)
    assert len({address for address, _ in found}) == len(found)
    for pool in pools:
        begins = {head.data_ptr() for part in pool for head in part[0, 0]}
        rows = sum(len(each) * each.shape[3] for each in pools)
        assert begins <= {address for address, _ in found[:rows]}


def test_what_is_written_meanwhile_stays() -> None:
    written = cache()
    for pool in written.pools:
        pool.fill_(3)
    assert all(bool((pool == 3).all()) for pool in taken(written).pools)


def test_memory_that_the_machine_is_short_of_is_left_to_others() -> None:
    left = iter([8 << 20, 4 << 20])
    assert faults_of_a_write(taken(cache(), lambda: next(left, 0))) > 0


@pytest.mark.parametrize(("flags", "early"), [({"role": "decode"}, True), ({"role": "prefill"}, False)])
def test_an_engine_takes_them_where_it_looks_for_blocks(flags: dict[str, str], early: bool) -> None:
    checkpoint = Checkpoint.open("qwen3_vl")
    with engine_cell(checkpoint, store="redis://127.0.0.1:1/0", **flags) as cell:
        sharing = cell.engine.sharing
        assert sharing is not None
        assert (sharing.pages is not None) == early
        if sharing.pages is not None:
            sharing.pages.wait()
            assert sharing.pages.taken == sum(pool.nbytes for pool in cell.engine.runner.kv_cache.pools)

"""Blocks go to host memory and come back as they went, in few copies."""

from __future__ import annotations

import random

import pytest
import torch

from triptych.pd_worker.attention.paged_kv_cache import PagedKVCache
from triptych.pd_worker.core.kv_cache.swap import BlockCopy
from triptych.pd_worker.runner.host_kv_cache import HostKVCache, copy_blocks


def filled_cache(num_blocks: int, dtype: torch.dtype = torch.float32) -> PagedKVCache:
    """Layer `l`, block `b`, its keys: 100 * l + b; its values the same with the other sign."""
    cache = PagedKVCache(
        num_layers=3,
        num_blocks=num_blocks,
        block_size=2,
        num_kv_heads=2,
        head_dim=4,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        numbers = 100 * layer + torch.arange(num_blocks, dtype=dtype)[:, None, None, None]
        keys.copy_(numbers.expand_as(keys))
        values.copy_(-numbers.expand_as(values))
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 5, 16, 17, 40])
def test_blocks_come_back_as_they_went(count: int, dtype: torch.dtype) -> None:
    rng = random.Random(count)
    cache, before = filled_cache(64, dtype), filled_cache(64, dtype)
    host = HostKVCache(cache, 48)
    sources, places = rng.sample(range(64), count), rng.sample(range(48), count)
    copy_blocks(cache, host, [BlockCopy(*pair) for pair in zip(sources, places, strict=True)])
    host.wait()
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(7)
    targets = rng.sample(range(64), count)
    copy_blocks(host, cache, [BlockCopy(*pair) for pair in zip(places, targets, strict=True)])
    for now, then in zip((*cache.keys, *cache.values), (*before.keys, *before.values), strict=True):
        assert torch.equal(now[targets], then[sources])
        others = sorted(set(range(64)) - set(targets))
        assert (now[others] == 7).all(), "no other block is touched"


def test_neighbours_in_host_memory_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled_cache(16)
    host = HostKVCache(cache, 16)
    lengths: list[int] = []
    copy = torch.Tensor.copy_

    def counting(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        lengths.append(len(self))
        return copy(self, source, non_blocking=non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", counting)
    copies = [BlockCopy(source, target) for source, target in zip((9, 1, 4, 2), (3, 4, 5, 9), strict=True)]
    copy_blocks(cache, host, copies)
    assert lengths == [3, 1]
    lengths.clear()
    copy_blocks(host, cache, [BlockCopy(copy.target, copy.source) for copy in copies])
    assert lengths == [3, 1]


def test_no_host_memory_is_taken_without_swap() -> None:
    host = HostKVCache(filled_cache(4), 0)
    assert host.blocks.numel() == 0
    copy_blocks(filled_cache(4), host, [])
    host.close()

"""What one layer gathers for the sequences that decode is bounded, whoever is in the batch."""

from __future__ import annotations

import random

import pytest
import torch

from support.engine.engine_requests import bare_decoder, make_cross, make_request
from triptych.pd_worker.attention import attention
from triptych.pd_worker.attention.metadata import plan_gathers
from triptych.pd_worker.attention.paged_kv_cache import PagedKVCache
from triptych.pd_worker.core.kv_cache.block_pool import PrefixChain
from triptych.pd_worker.core.outputs import ScheduledChunk
from triptych.pd_worker.core.request import RequestState
from triptych.pd_worker.runner.batch import BatchBuilder, in_batch_order

KV_HEADS, DIM, BLOCK = 2, 16, 4
#: Of keys and values in one layer.
BLOCK_BYTES = 2 * BLOCK * KV_HEADS * DIM * 4


@pytest.mark.parametrize("seed", range(200))
def test_every_group_is_below_the_limit_or_one_decode_and_all_are_in_one(seed: int) -> None:
    draw = random.Random(seed)
    blocks = [draw.choice([1, 2, 3, 50, 1000]) for _ in range(draw.randrange(1, 70))]
    most = draw.choice([1, 7, 100, 5000])
    groups = plan_gathers(blocks, most)
    assert [i for group in groups for i in range(group.first, group.last)] == list(range(len(blocks)))
    for group in groups:
        assert group.blocks == max(blocks[group.first : group.last])
        assert group.last - group.first == 1 or (group.last - group.first) * group.blocks <= most


def _cache() -> PagedKVCache:
    cache = PagedKVCache(
        num_layers=1, num_blocks=1000, block_size=BLOCK, num_kv_heads=KV_HEADS, head_dim=DIM,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    for blocks in (*cache.keys, *cache.values):
        blocks.copy_(torch.randn(blocks.shape, generator=torch.Generator().manual_seed(1)))
    return cache


def _chunk(index: int, blocks: int, rng: random.Random) -> ScheduledChunk:
    """A decode in `blocks` blocks of a sequence, with as many of an encoder output."""
    length = blocks * BLOCK - rng.randrange(BLOCK)
    rows = blocks * BLOCK - rng.randrange(BLOCK)
    request = make_request(f"r{index}", [1] * length, [make_cross(f"r{index}", rows)])
    state = RequestState(request, PrefixChain(b"r", request.prompt_token_ids, [], (), BLOCK))
    own, cross = (tuple(rng.sample(range(1000), blocks)) for _ in range(2))
    return ScheduledChunk(state, length - 1, 1, own, (), False, cross, rows)


def _attend(
    chunks: list[ScheduledChunk], limit: int, *, cross: bool, backend: str
) -> tuple[torch.Tensor, int]:
    cache, heads = _cache(), 4
    builder = BatchBuilder(cache, bare_decoder(), backend=backend, gather_bytes=limit)
    metadata = builder.build(chunks, {}).attention
    module = torch.nn.Module()
    module.layer_idx, module.is_cross = 0, cross  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(1, heads, len(chunks), DIM, generator=generator)
    new = torch.randn(1, KV_HEADS, len(chunks), DIM, generator=generator)
    largest = 0
    with pytest.MonkeyPatch.context() as patch:
        inner = attention._gather

        def spied(blocks: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
            nonlocal largest
            out: torch.Tensor = inner(blocks, tables)
            largest = max(largest, out.untyped_storage().nbytes())
            return out

        patch.setattr(attention, "_gather", spied)
        out, _ = attention.paged_attention(module, query, new, new, None, attn_metadata=metadata)
    return out, largest


@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("backend", ["sdpa", "blockwise"])
def test_one_long_sequence_among_many_does_not_make_long_copies_of_all(cross: bool, backend: str) -> None:
    rng = random.Random(0)
    sizes = [1, 2, 3, 2, 1, 60, 2, 3, 1, 2, 2, 3]
    chunks, _ = in_batch_order([_chunk(index, blocks, rng) for index, blocks in enumerate(sizes)])
    assert [len(chunk.block_ids) for chunk in chunks] == sorted(sizes)
    whole, everything = _attend(chunks, 1 << 30, cross=cross, backend=backend)
    grouped, largest = _attend(chunks, 12 * BLOCK_BYTES, cross=cross, backend=backend)
    torch.testing.assert_close(grouped, whole, atol=1e-5, rtol=1e-5)
    # Keys, or values, of the long one alone.
    long = 60 * BLOCK_BYTES // 2
    assert 0 < largest <= max(long, 12 * BLOCK_BYTES)
    if not cross:
        assert everything == len(sizes) * long

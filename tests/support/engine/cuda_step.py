"""One step of attention on CUDA: four decodes and a chunk in the middle of its sequence, drawn at random."""

from __future__ import annotations

from typing import Any

import torch

from triptych.models.base import AttentionBias
from triptych.pd_worker.attention.attention import (
    AttentionMetadata,
    PagedKVCache,
    PrefillSpan,
    paged_attention,
)

HEADS, DIM, BLOCK = 8, 64, 16
LENGTHS, CHUNK = (1, 15, 130, 700), (300, 1000)


def step(
    backend: str, dtype: torch.dtype, kv_heads: int, bias: AttentionBias | None, **options: Any
) -> torch.Tensor:
    """[T, heads, dim] of four decodes and a chunk in the middle of its sequence."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=dtype)

    start, end = CHUNK
    counts = [-(-length // BLOCK) for length in (*LENGTHS, end)]
    order = torch.arange(sum(counts)).split(counts)
    cache = PagedKVCache(
        num_layers=1, num_blocks=sum(counts), block_size=BLOCK, num_kv_heads=kv_heads, head_dim=DIM,
        dtype=dtype, device=torch.device("cuda"),
    )  # fmt: skip
    for blocks in (*cache.keys, *cache.values):
        blocks.copy_(draw(*blocks.shape))
    tables = torch.nn.utils.rnn.pad_sequence(list(order[:-1]), batch_first=True)
    slots = [int(table[-1]) * BLOCK + (n - 1) % BLOCK for table, n in zip(order, LENGTHS, strict=False)]
    tokens = len(LENGTHS) + end - start
    metadata = AttentionMetadata(
        cache=cache,
        slots=torch.cat([torch.tensor(slots).cuda(), cache.slots(order[-1].tolist(), end)[start:]]),
        num_decodes=len(LENGTHS),
        decode_tables=tables.cuda(),
        decode_lengths=torch.tensor(LENGTHS).cuda(),
        prefills=[PrefillSpan(len(LENGTHS), tokens, start, order[-1].cuda())],
        bias=bias,
        backend=backend,
    )
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    query, key, value = (draw(1, heads, tokens, DIM) for heads in (HEADS, kv_heads, kv_heads))
    with torch.inference_mode():
        out, _ = paged_attention(
            module, query, key, value, None, scaling=0.1, attn_metadata=metadata, **options
        )
    return out[0]

"""One step of attention on CUDA: four decodes and a chunk in the middle of its sequence, drawn at random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from triptych.pd_worker.attention.attention import (
    AttentionMetadata,
    PagedKVCache,
    PrefillSpan,
    paged_attention,
)

HEADS, DIM, BLOCK = 8, 64, 16
LENGTHS, CHUNK = (1, 15, 130, 700), (300, 1000)


def step(
    backend: str,
    dtype: torch.dtype,
    kv_heads: int,
    bias: torch.Tensor | None,
    *,
    dim: int = DIM,
    chunk: tuple[int, int] = CHUNK,
    **options: Any,
) -> torch.Tensor:
    """[T, heads, dim] of four decodes and a chunk in the middle of its sequence."""
    run = prepared(backend, dtype, kv_heads, bias, dim=dim, chunk=chunk, **options)
    return run()


def step_peak(backend: str, dtype: torch.dtype, kv_heads: int, **options: Any) -> int:
    """Bytes that a step takes above what it is given; RuntimeError where the kernel waits for the device."""
    run = prepared(backend, dtype, kv_heads, None, dim=DIM, **options)
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error" if backend == "triton" else "default")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return torch.cuda.max_memory_allocated() - before


def prepared(
    backend: str,
    dtype: torch.dtype,
    kv_heads: int,
    bias: torch.Tensor | None,
    *,
    dim: int,
    chunk: tuple[int, int],
    **options: Any,
) -> Callable[[], torch.Tensor]:
    """The step, with its inputs on the device."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=dtype)

    start, end = chunk
    counts = [-(-length // BLOCK) for length in (*LENGTHS, end)]
    order = torch.arange(sum(counts)).split(counts)
    cache = PagedKVCache(
        num_layers=1, num_blocks=sum(counts), block_size=BLOCK, num_kv_heads=kv_heads, head_dim=dim,
        dtype=dtype, device=torch.device("cuda"),
    )  # fmt: skip
    for blocks in (*cache.keys, *cache.values):
        blocks.copy_(draw(*blocks.shape))
    tables = torch.nn.utils.rnn.pad_sequence(list(order[:-1]), batch_first=True)
    slots = [int(table[-1]) * BLOCK + (n - 1) % BLOCK for table, n in zip(order, LENGTHS, strict=False)]
    tokens = len(LENGTHS) + end - start
    given: dict[str, Any] = {
        "cache": cache,
        "slots": torch.cat([torch.tensor(slots).cuda(), cache.slots(order[-1].tolist(), end)[start:]]),
        "num_decodes": len(LENGTHS),
        "decode_tables": tables.cuda(),
        "decode_lengths": torch.tensor(LENGTHS).cuda(),
        "prefills": [PrefillSpan(len(LENGTHS), tokens, start, order[-1].cuda())],
        "bias": bias,
        "backend": backend,
    }
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    query, key, value = (draw(1, heads, tokens, dim) for heads in (HEADS, kv_heads, kv_heads))

    @torch.inference_mode()
    def run() -> torch.Tensor:
        # Metadata keep what they make for all layers of one step.
        metadata = AttentionMetadata(**given)
        out, _ = paged_attention(
            module, query, key, value, None, scaling=0.1, attn_metadata=metadata, **options
        )
        return out[0]

    return run

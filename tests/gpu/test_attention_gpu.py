"""Backends of paged attention on CUDA against each other, over one step of decodes and a chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from triptych.pd_worker.attention.attention import paged_attention
from triptych.pd_worker.attention.metadata import AttentionMetadata, PagedKVCache, PrefillSpan

pytestmark = pytest.mark.gpu


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


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}, {"softcap": 3.0}])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_a_step_is_that_of_sdpa(kv_heads, options, dtype, atol):
    actual, sdpa = (step(name, dtype, kv_heads, None, **options) for name in ("triton", "sdpa"))
    torch.testing.assert_close(actual, sdpa, atol=atol, rtol=1e-2)


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_a_bias_by_distance_is_that_of_sdpa(kv_heads: int) -> None:
    bias = torch.randn(HEADS, 50, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    actual, sdpa = (step(name, torch.float32, kv_heads, bias) for name in ("triton", "sdpa"))
    torch.testing.assert_close(actual, sdpa, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_sinks_are_those_of_sdpa(dtype: torch.dtype, atol: float) -> None:
    sinks = torch.linspace(-3, 6, HEADS, device="cuda")
    actual, sdpa = (step(name, dtype, 2, None, s_aux=sinks) for name in ("triton", "sdpa"))
    torch.testing.assert_close(actual, sdpa, atol=atol, rtol=1e-2)


@pytest.mark.parametrize("dim", [64, 72, 96, 128, 160, 256])
@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 3e-2)]
)
def test_widths_of_heads_of_a_step_are_those_of_sdpa(dim: int, dtype: torch.dtype, atol: float) -> None:
    actual, sdpa = (step(name, dtype, 2, None, dim=dim) for name in ("triton", "sdpa"))
    torch.testing.assert_close(actual, sdpa, atol=atol, rtol=1e-2)


def test_the_kernel_waits_for_nothing_and_allocates_nothing_of_the_size_of_all_scores() -> None:
    """One step again, when its kernels are compiled: 4,096 queries have 16 M scores for each head."""
    bounds = (4096, 8192)
    kernel, sdpa = (step_peak(backend, torch.bfloat16, 2, chunk=bounds) for backend in ("triton", "sdpa"))
    assert kernel < 64 * 2**20 < sdpa

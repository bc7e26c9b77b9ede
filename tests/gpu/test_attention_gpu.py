"""Backends of paged attention on CUDA against each other, over one step of decodes and a chunk."""

from __future__ import annotations

import pytest
import torch

from support.engine.cuda_step import HEADS, step, step_peak

pytestmark = pytest.mark.gpu


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

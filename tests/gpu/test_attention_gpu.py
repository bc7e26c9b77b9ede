"""Backends of paged attention on CUDA against each other, over one step of decodes and a chunk."""

from __future__ import annotations

import pytest
import torch

from support.engine.cuda_step import HEADS, step
from triptych.models.families.t5 import RelativeBias

pytestmark = pytest.mark.gpu


class Distances(RelativeBias):
    def __init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(1)
        self.table = torch.randn(HEADS, 50, generator=generator, device="cuda")


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}, {"softcap": 3.0}])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_a_step_is_that_of_sdpa(
    kv_heads: int, options: dict[str, object], dtype: torch.dtype, atol: float
) -> None:
    actual, sdpa = (step(backend, dtype, kv_heads, None, **options) for backend in ("blockwise", "sdpa"))
    torch.testing.assert_close(actual, sdpa, atol=atol, rtol=1e-2)


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_a_bias_by_distance_is_that_of_sdpa(kv_heads: int) -> None:
    actual, sdpa = (step(backend, torch.float32, kv_heads, Distances()) for backend in ("blockwise", "sdpa"))
    torch.testing.assert_close(actual, sdpa, atol=1e-4, rtol=1e-3)

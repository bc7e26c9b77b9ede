"""FlashInfer's kernels against torch's own on the same step; needs the package flashinfer-python."""

from __future__ import annotations

import pytest
import torch

from support.engine.cuda_step import step

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}, {"softcap": 3.0}])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_step_is_that_of_sdpa(kv_heads: int, options: dict[str, object], dtype: torch.dtype) -> None:
    found, wanted = (step(backend, dtype, kv_heads, None, **options) for backend in ("flashinfer", "sdpa"))
    torch.testing.assert_close(found, wanted, atol=3e-2, rtol=3e-2)

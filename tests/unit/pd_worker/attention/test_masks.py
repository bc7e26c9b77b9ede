"""A step's masks are made once for all layers, as torch's attention adds them, in rows that need no copy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from triptych.models.geometry import LayerRule
from triptych.pd_worker.attention import backends
from triptych.pd_worker.attention.attention import paged_attention
from triptych.pd_worker.attention.metadata import AttentionMetadata, PrefillSpan, added_mask
from triptych.pd_worker.attention.paged_kv_cache import PagedKVCache

LAYERS, BLOCK, DIM = 3, 4, 8


def metadata(backend: str = "sdpa") -> AttentionMetadata:
    """Two decodes of 5 and 9 tokens, and the second chunk of a prompt, at positions 3 to 7."""
    cache = PagedKVCache(
        num_layers=LAYERS, num_blocks=16, block_size=BLOCK, num_kv_heads=2, head_dim=DIM,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    return AttentionMetadata(
        cache=cache,
        slots=torch.tensor([4, 16, 43, 44, 45, 46, 47]),
        num_decodes=2,
        decode_tables=torch.tensor([[0, 1, 0], [2, 3, 4]]),
        decode_lengths=torch.tensor([5, 9]),
        prefills=[PrefillSpan(2, 7, 3, torch.tensor([9, 10]))],
        backend=backend,
    )


def attend(meta: AttentionMetadata, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    out = []
    for layer in range(LAYERS):
        query, key, value = torch.randn(1, 4, 7, DIM), torch.randn(1, 2, 7, DIM), torch.randn(1, 2, 7, DIM)
        module: Any = SimpleNamespace(layer_idx=layer)
        out.append(paged_attention(module, query, key, value, None, attn_metadata=meta, **options)[0])
    return out


def test_all_layers_are_given_the_same_masks_as_what_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = backends.F.scaled_dot_product_attention
    given: list[torch.Tensor] = []

    def seen(*args: Any, **options: Any) -> torch.Tensor:
        given.append(args[3])
        return kernel(*args, **options)

    monkeypatch.setattr(backends.F, "scaled_dot_product_attention", seen)
    outputs = attend(metadata())
    assert len(given) == 2 * LAYERS
    assert len({mask.data_ptr() for mask in given}) == 2, "one of the decodes, one of the chunk"
    for mask in given:
        assert mask.dtype == torch.float32 and mask.stride(-1) == 1
        assert all(stride % 16 == 0 for stride in mask.stride()[:-1])
    for output, expected in zip(outputs, attend(metadata("blockwise")), strict=True):
        torch.testing.assert_close(output, expected)


def test_a_cap_of_the_scores_has_masks_of_bools(monkeypatch: pytest.MonkeyPatch) -> None:
    attend(meta := metadata(), softcap=30.0)
    assert meta.decode_mask(LayerRule()).dtype == torch.bool  # type: ignore[union-attr]
    assert {dtype for _, _, dtype in meta._masks} == {None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_added_mask_is_zero_or_minus_infinity(dtype: torch.dtype) -> None:
    mask = torch.rand(3, 1, 1, 37) < 0.5
    added = added_mask(mask, dtype)
    assert added.dtype == dtype and added.shape == mask.shape
    assert torch.equal(added == 0, mask) and torch.equal(added == float("-inf"), ~mask)

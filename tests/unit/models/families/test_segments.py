"""The attention of packed segments: rotary positions, and segments apart from each other."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

from triptych.models.families.segments import rotated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 9])
def test_queries_and_keys_are_rotated_as_transformers_does(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    packed = torch.randn(rows, 3, 4, 8).to(dtype)
    angles = torch.randn(rows, 4).repeat(1, 2)
    before = packed.clone()
    wanted = torch.stack(
        apply_rotary_pos_emb_vision(packed[:, 0], packed[:, 1], angles.cos(), angles.sin()), 1
    )
    found = rotated(packed[:, :2], angles.cos(), angles.sin())
    assert found.dtype == dtype
    assert torch.equal(found, wanted)
    assert torch.equal(packed, before), "the projection's own output is not written to"

"""Faster modules in the place of a tower's own: patch embeddings and the attention of Qwen's towers."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionAttention

from triptych.models.families.segments import SegmentAttention


class _OnePatch:
    """A convolution that computes inputs of one patch each as one matrix product, several times as fast."""

    kernel_size: Any
    weight: Any
    bias: Any

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[2:] != self.kernel_size:
            rows: torch.Tensor = super().forward(x)  # type: ignore[misc]
            return rows
        rows = functional.linear(x.flatten(1), self.weight.flatten(1), self.bias)
        return rows.view(*rows.shape, *(1 for _ in self.kernel_size))


class PatchConv2d(_OnePatch, nn.Conv2d):
    """For patches [count, channels, height, width]."""


class PatchConv3d(_OnePatch, nn.Conv3d):
    """For patches [count, channels, frames, height, width]."""


_CONVOLUTIONS = {nn.Conv2d: PatchConv2d, nn.Conv3d: PatchConv3d}


def speed_up(module: nn.Module) -> None:
    """Replaces, in place, what has a faster module; parameters and their names stay."""
    for part in list(module.modules()):
        if type(part) in _CONVOLUTIONS and not any(part.padding) and part.groups == 1:  # type: ignore[arg-type]
            part.__class__ = _CONVOLUTIONS[type(part)]  # type: ignore[index]
        for name, child in part.named_children():
            kind: Any = type(child)
            if hasattr(child, "qkv") and attends_in_segments(kind):
                setattr(part, name, SegmentAttention(child))


@functools.cache
def attends_in_segments(attention: Any) -> bool:
    """Whether transformers computes this attention by the same code as that of Qwen3-VL's tower."""
    return _code(attention) == _code(Qwen3VLVisionAttention)


def _code(attention: Any) -> list[str]:
    module = vars(sys.modules[attention.__module__])
    helpers = [module.get(name) for name in ("apply_rotary_pos_emb_vision", "rotate_half")]
    return [inspect.getsource(part) for part in (attention.forward, *helpers) if part is not None]

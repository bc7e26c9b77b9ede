"""A tower's patch embedding as one matrix product."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class PatchLinear(nn.Module):
    """In the place of a convolution over patches that touch nothing beside them: kernel, stride and input
    are one patch, so that the sum is a product with a matrix, and several times as fast.

    Takes [patches, channels, *patch] and gives [patches, out, 1, ...], as the convolution does.
    """

    def __init__(self, original: nn.Conv3d) -> None:
        super().__init__()
        if original.kernel_size != original.stride or any(original.padding) or original.groups != 1:
            raise ValueError(f"{original} looks beyond one patch")
        self.weight, self.bias = original.weight, original.bias

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        rows = functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)
        return rows.view(*rows.shape, *(1 for _ in patches.shape[2:]))

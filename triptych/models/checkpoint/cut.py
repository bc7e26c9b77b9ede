"""The part of a checkpoint's tensor that one rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Cut:
    """Indices `first` to `last` of dimension `dim`, which has `whole` in the file."""

    dim: int
    first: int
    last: int
    whole: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of this part of the whole tensor."""
        return tensor.narrow(self.dim, self.first, self.last - self.first)

    def fits(self, shape: list[int]) -> bool:
        """Whether a tensor of this shape is the one that the cut was made for."""
        return self.dim < len(shape) and shape[self.dim] == self.whole

"""int8 quantization of linear layers: 8-bit weights and a scale per output channel.

`int8` holds the linear layers of both sides so, `int8-decoder` those of the decoder alone, which leaves the
embeddings of items, and their keys in the store, as they are. `w8a8` and `w8a8-decoder` hold the same weights
and round the layers' inputs to 8 bits, too (`w8a8_linear.py`). Token embeddings, the head, convolutions and
norms keep their dtype.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

NONE, INT8, INT8_DECODER, W8A8, W8A8_DECODER = "none", "int8", "int8-decoder", "w8a8", "w8a8-decoder"
QUANTIZATIONS = (NONE, INT8, INT8_DECODER, W8A8, W8A8_DECODER)
#: The head decides between tokens that are nearly alike, and is often the token embedding itself.
_KEPT = frozenset({"lm_head"})
#: Up to so many rows torch's own kernel for 8-bit weights is the faster one; it is slow in float32.
_KERNEL_ROWS = 4
#: It reads so many inputs at a time, and beyond the end of what is no multiple.
_KERNEL_INPUTS = 16
#: Weights are cast so many bytes at a time: what was cast is still in the cache when it is multiplied.
_CAST_BYTES = 1 << 20


def encoder_is_quantized(quantization: str) -> bool:
    return quantization in (INT8, W8A8)


def decoder_is_quantized(quantization: str) -> bool:
    return quantization != NONE


def inputs_are_quantized(quantization: str) -> bool:
    """Whether quantized layers round their inputs, too."""
    return quantization in (W8A8, W8A8_DECODER)


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [out, in] and float32 scales [out] of a weight [out, in]: symmetric, to the nearest."""
    full = weight.float()
    scale = full.abs().amax(dim=1) / 127
    # A channel of zeros stays one.
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (full / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale


class Int8Linear(nn.Module):
    """A linear layer in place of an `nn.Linear`: y = (x Wᵀ) s + b, with W in int8."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = original.in_features, original.out_features
        meta = torch.device("meta")
        shape = (original.out_features, original.in_features)
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.int8, device=meta), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(shape[0], device=meta), requires_grad=False)
        self.bias = original.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features], in x's dtype."""
        rows = x.reshape(-1, self.in_features)
        if self._suits_kernel(rows):
            ones = torch.ones(self.out_features, dtype=x.dtype)
            product = torch._weight_int8pack_mm(rows, self.weight, ones)
        else:
            product = self._by_casting(rows)
        out = (product * self.scale).to(x.dtype)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features)

    def _suits_kernel(self, rows: torch.Tensor) -> bool:
        few = len(rows) <= _KERNEL_ROWS and self.in_features % _KERNEL_INPUTS == 0
        return few and rows.dtype == torch.bfloat16 and rows.is_cpu

    def _by_casting(self, rows: torch.Tensor) -> torch.Tensor:
        step = max(1, _CAST_BYTES // (self.in_features * rows.element_size()))
        if not rows.is_cpu or step >= self.out_features:
            return functional.linear(rows, self.weight.to(rows.dtype))
        # One buffer for all: fresh memory for each part would cost as much as the product.
        buffer = rows.new_empty(step, self.in_features)
        out = rows.new_empty(len(rows), self.out_features)
        for first in range(0, self.out_features, step):
            part = self.weight[first : first + step]
            cast = buffer[: len(part)].copy_(part)
            out[:, first : first + len(part)] = functional.linear(rows, cast)
        return out


def replace_linears(module: nn.Module) -> set[str]:
    """Puts an `Int8Linear` in the place of every linear layer; names of the weights now in 8 bits."""
    made: dict[int, Int8Linear] = {}
    names = set()
    for path, parent in list(module.named_modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or name in _KEPT:
                continue
            # A layer that two modules hold stays one.
            setattr(parent, name, made.setdefault(id(child), Int8Linear(child)))
            names.add(f"{path}.{name}.weight".lstrip("."))
    return names

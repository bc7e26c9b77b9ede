"""Linear layers of 8-bit weights with a scale per output channel, also with inputs rounded to 8 bits.

`int8` holds the linear layers of both sides so, `int8-decoder` those of the decoder alone, which leaves the
embeddings of items, and their keys in the store, as they are. `w8a8` and `w8a8-decoder` hold the same weights
and multiply them with activations in 8 bits, by oneDNN on a CPU, as vLLM's dynamic W8A8: these get a scale
per row (token) as they come, symmetric as well. Sums of whole numbers are exact, so what a row gives does not
depend on the rows beside it. Token embeddings, the head, convolutions and norms keep their dtype.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.nn import functional

from triptych.base.errors import ConfigError
from triptych.models.weights.readers import read_elsewhere

#: Those of torch's compiler for CPUs: the only ones that take a row's whole numbers as they are.
_OPERATORS = ("qlinear_prepack", "qlinear_pointwise")
#: Elements that are rounded at a time: what was cast to float32 is still in the cache when it is multiplied.
_PART = 1 << 17
#: A row whose largest element is smaller counts as zeros: 127 divided by it would be infinite.
_MINIMUM = 1e-30


class W8A8Linear(nn.Module):
    """A linear layer in place of an `Int8Linear`: y = (q Wᵀ) s m + b, with W and q in int8.

    `weight` is W in oneDNN's layout, `scale` s [out_features]; q and m are those of `quantize_rows`.
    """

    def __init__(self, original: Int8Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = original.in_features, original.out_features
        packed = torch.ops.onednn.qlinear_prepack(original.weight.detach(), None)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.scale = nn.Parameter(original.scale.detach() / 127, requires_grad=False)
        self.bias = original.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features], in x's dtype. A row with NaN or infinity gives such."""
        whole, largest = quantize_rows(x.reshape(-1, self.in_features))
        # The product comes before it is multiplied by the row's magnitude: too small for float16.
        dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
        out = _product(whole, self.weight, self.scale, dtype)
        # Exact in bfloat16: the magnitude is an element of x.
        out = out.mul_(largest.to(dtype)).to(x.dtype)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [rows, in] and the rows' largest magnitudes, float32 [rows, 1], of x [rows, in].

    x is about int8 * magnitude / 127. The magnitude of a row that holds NaN or infinity is not finite.
    """
    if x.numel() <= _PART:
        return _rounded(x)
    whole = x.new_empty(x.shape, dtype=torch.int8)
    largest = x.new_empty(len(x), 1, dtype=torch.float32)
    step = max(1, _PART // x.shape[1])
    for first in range(0, len(x), step):
        rows = slice(first, first + step)
        whole[rows], largest[rows] = _rounded(x[rows])
    return whole, largest


def _rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    full = x.float()
    largest = full.abs().amax(-1, keepdim=True).clamp_min_(_MINIMUM)
    return (full * (127 / largest)).round_().to(torch.int8), largest


def check_w8a8(quantization: str, device: torch.device) -> None:
    """ConfigError where `quantization`, a value of --quantization, cannot be computed."""
    if device.type != "cpu":
        raise ConfigError(
            f"--quantization {quantization} multiplies on CPUs only, not on {device}: "
            "give --quantization none, or --device cpu"
        )
    if not is_exact():
        raise ConfigError(
            f"--quantization {quantization}: this CPU with torch {torch.__version__} does not multiply 8-bit "
            "integers exactly, which takes AVX512-VNNI, AVX-VNNI or AMX: give --quantization int8 or none"
        )


def is_exact() -> bool:
    """Whether oneDNN sums the largest products here without saturation; without VNNI it does not."""
    if not all(hasattr(torch.ops.onednn, name) for name in _OPERATORS):
        return False
    largest = torch.full((64, 64), 127, dtype=torch.int8)
    try:
        packed = torch.ops.onednn.qlinear_prepack(largest, None)
        out = _product(torch.stack([largest[0], -largest[0]]), packed, torch.ones(64), torch.float32)
    except RuntimeError:
        return False
    maximum = 127 * 127 * 64
    return bool((out[0] == maximum).all() and (out[1] == -maximum).all())


def _product(
    whole: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """int8 [rows, in] times a packed weight, each output times its scale, in `dtype`."""
    zeros = torch.zeros(len(scale), dtype=torch.int32)
    out: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        whole, 1.0, 0, packed, scale, zeros, None, 1.0, 0, dtype, "none", [], ""
    )
    return out


def quantize_inputs(module: nn.Module) -> None:
    """Puts a `W8A8Linear` in the place of every loaded `Int8Linear`."""
    made: dict[int, W8A8Linear] = {}
    # Names, not layers: what holds a layer that was replaced keeps its weight in memory.
    for parent in [part for part in module.modules() if part._modules]:
        for name in list(parent._modules):
            child = parent._modules[name]
            if type(child) is not Int8Linear:
                continue
            # A layer that two modules hold stays one.
            if id(child) not in made:
                made[id(child)] = W8A8Linear(child)
            setattr(parent, name, made[id(child)])


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
            # Before its scale a product is up to 127 times as large: float16 ends at 65504.
            product = self._by_casting(rows.float() if rows.dtype == torch.float16 else rows)
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


def quantize_linears(module: nn.Module, kept: Collection[nn.Module]) -> int:
    """Puts an `Int8Linear` in the place of every loaded linear layer but those of `kept`, and their number.

    A layer whose weight other code reads, if only its dtype, stays as it is.
    """
    read = read_elsewhere(module, dtypes=True) | {id(layer) for layer in kept}
    made: dict[int, Int8Linear] = {}
    # Names, not layers: what holds a layer that was replaced keeps its weight in memory.
    for parent in [part for part in module.modules() if part._modules]:
        for name in list(parent._modules):
            child = parent._modules[name]
            if type(child) is not nn.Linear or id(child) in read:
                continue
            # A layer that two modules hold stays one.
            if id(child) not in made:
                made[id(child)] = layer = Int8Linear(child)
                weight, scale = quantize(child.weight.detach())
                layer.weight = nn.Parameter(weight, requires_grad=False)
                layer.scale = nn.Parameter(scale, requires_grad=False)
            setattr(parent, name, made[id(child)])
    return len(made)

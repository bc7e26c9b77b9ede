"""W8A8 linear layers for CPUs: 8-bit weights times activations that are rounded to 8 bits, by oneDNN.

As vLLM's dynamic W8A8: weights and their scales per output channel are those of `Int8Linear`, activations get
a scale per row (token) as they come, symmetric as well. Sums of whole numbers are exact, so what a row gives
does not depend on the rows beside it.
"""

from __future__ import annotations

import torch
from torch import nn

from triptych.base.errors import ConfigError
from triptych.models.weights.quantization import Int8Linear

#: Those of torch's compiler for CPUs: the only ones that take a row's whole numbers as they are.
_OPERATORS = ("qlinear_prepack", "qlinear_pointwise")
#: Elements that are rounded at a time: what was cast to float32 is still in the cache when it is multiplied.
_PART = 1 << 17
#: A row whose largest element is smaller counts as zeros: 127 divided by it would be infinite.
_LEAST = 1e-30


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
    largest = full.abs().amax(-1, keepdim=True).clamp_min_(_LEAST)
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
    most = 127 * 127 * 64
    return bool((out[0] == most).all() and (out[1] == -most).all())


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

"""RMSNorm in one call of torch, in place of a family's own module of that formula."""

from __future__ import annotations

import torch
from torch import nn

#: What the families call the number under the root.
_EPSILONS = ("variance_epsilon", "eps")
#: By dtype: how far a result may be off, relative to the largest.
_ERRORS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def fuse_norms(module: nn.Module) -> None:
    """Puts an `nn.RMSNorm` in the place of every norm that gives the same numbers, whatever its class.

    Each class is tried on random rows, tiny ones among them, which the epsilon decides.
    """
    alike: dict[type[nn.Module], bool] = {}
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            fused = None if child is None else _candidate(child)
            if child is None or fused is None:
                continue
            kind = type(child)
            if kind not in alike:
                alike[kind] = _same_numbers(child, fused)
            if alike[kind]:
                setattr(parent, name, fused)


def _candidate(norm: nn.Module) -> nn.RMSNorm | None:
    """The torch module that `norm` may be; None for one that has not the parts of an RMSNorm."""
    weight = norm._parameters.get("weight")
    epsilon = next(
        (value for name in _EPSILONS if isinstance(value := getattr(norm, name, None), float)), None
    )
    if isinstance(norm, nn.RMSNorm) or weight is None or epsilon is None:
        return None
    if (
        weight.dim() != 1
        or weight.is_meta
        or weight.dtype not in _ERRORS
        or len(list(norm.parameters())) != 1
    ):
        return None
    fused = nn.RMSNorm(len(weight), epsilon, device="meta")
    fused.weight = weight
    return fused


@torch.no_grad()
def _same_numbers(norm: nn.Module, fused: nn.RMSNorm) -> bool:
    weight, epsilon = fused.weight, fused.eps or 0.0
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, len(weight), generator=generator).to(weight.device, weight.dtype)
    # Of the last row the mean square is about epsilon; a mean that is not 0 tells it from a LayerNorm.
    sizes = torch.tensor([1.0, 8.0, 0.1, epsilon**0.5], device=weight.device, dtype=weight.dtype)
    rows = (rows + 0.5) * sizes[:, None]
    # The copy's weight is no 1, since a checkpoint's may be, and a formula may add 1 to it.
    probe = nn.RMSNorm(len(weight), epsilon, device="meta")
    drawn = torch.randn(len(weight), generator=generator).to(weight.device, weight.dtype)
    kept = norm.weight
    try:
        norm.weight = probe.weight = nn.Parameter(drawn, requires_grad=False)
        theirs, ours = norm(rows), probe(rows)
    finally:
        norm.weight = kept
    if not isinstance(theirs, torch.Tensor) or theirs.dtype != ours.dtype or theirs.shape != ours.shape:
        return False
    off = (theirs.float() - ours.float()).abs().max()
    return bool(off <= _ERRORS[weight.dtype] * theirs.float().abs().max())

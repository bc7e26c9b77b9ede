"""The kernels that a worker computes with, and why it does not compute with faster ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from triptych.base.machine.pages import why_no_huge_pages
from triptych.kernels.cpu_linear import instructions_here
from triptych.kernels.library import kernel_library
from triptych.models.weights.prepack import PrepackedLinear, can_prepack
from triptych.models.weights.product_choice import AUTO, ONEDNN

#: By the number that the kernels give them.
SETS = ("plain C++", "AVX2", "AVX-512", "AVX-512 with bfloat16", "AMX")
_NO_LIBRARY = "no compiled kernels: install g++, or a wheel that has them"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a machine has for the kernels."""

    #: Whether there is a library of ours, and the widest of SETS for it.
    compiled: bool
    instructions: int
    #: Whether oneDNN lays out weights of bfloat16, and the outputs of its blocks where our kernel reads them.
    blocked: bool
    block: int
    #: Why memory is not in huge pages; "" where it is.
    no_huge_pages: str = ""

    @classmethod
    def of_this(cls) -> Capabilities:
        """Those of this machine, by a small layer."""
        blocked = can_prepack(torch.device("cpu"), torch.bfloat16)
        probe = PrepackedLinear(nn.Linear(64, 64).to(torch.bfloat16)) if blocked else None
        return cls(
            kernel_library() is not None,
            instructions_here(),
            blocked,
            0 if probe is None else probe.block,
            why_no_huge_pages(),
        )


@dataclass(frozen=True, slots=True)
class KernelUse:
    """What computes a part of a step; `why` says why nothing faster does, "" where we know nothing faster."""

    part: str
    kernel: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.part}: {self.kernel}" + (f" ({self.why})" if self.why else "")


def kernels_in_use(
    has: Capabilities,
    *,
    device: str,
    dtype: torch.dtype,
    attention: str,
    linear: str = AUTO,
    quantization: str = "none",
    chosen: tuple[int, int] | None = None,
) -> tuple[KernelUse, ...]:
    """One for the products of few rows, one for attention, and one for the pages of weights and KV cache.

    `attention` is the backend in use; `linear` and `quantization` are the flags' values. `chosen`: for how
    many pairs of size and rows our product is the faster, and of how many.
    """
    if device != "cpu":
        return KernelUse("linear", "torch"), KernelUse("attention", attention)
    pages = (
        KernelUse("pages", "4 KiB", has.no_huge_pages) if has.no_huge_pages else KernelUse("pages", "2 MiB")
    )
    return _linear(has, dtype, linear, quantization, chosen), _attention(has, dtype, attention), pages


def _linear(
    has: Capabilities, dtype: torch.dtype, linear: str, quantization: str, chosen: tuple[int, int] | None
) -> KernelUse:
    part = "linear"
    if quantization != "none":
        return KernelUse(part, "8 bits", f"--quantization {quantization} has its own products")
    if dtype != torch.bfloat16:
        return KernelUse(part, "oneDNN", "ours multiplies bfloat16: --dtype bfloat16")
    if not has.blocked:
        return KernelUse(part, "torch", "oneDNN lays out no bfloat16 on this chip: it wants AVX-512")
    if not has.compiled:
        return KernelUse(part, "oneDNN", _NO_LIBRARY)
    if not has.block:
        return KernelUse(
            part, "oneDNN", "ours does not read its layout: it wants AVX-512 with bfloat16, or AMX"
        )
    if linear == ONEDNN:
        return KernelUse(part, "oneDNN", f"--linear-kernel {ONEDNN}")
    if chosen is not None and linear == AUTO and chosen[0] < chosen[1]:
        slower = f"oneDNN is faster for {chosen[1] - chosen[0]} of {chosen[1]} sizes and rows"
        return KernelUse(part, SETS[has.instructions] if chosen[0] else "oneDNN", slower)
    return KernelUse(part, SETS[has.instructions], _narrower(has))


def _attention(has: Capabilities, dtype: torch.dtype, backend: str) -> KernelUse:
    if backend != "cpu":
        return KernelUse("attention", backend, "" if has.compiled else _NO_LIBRARY)
    if dtype == torch.float32 and has.instructions > 2:
        return KernelUse("attention", SETS[2], "wider ones are of bfloat16: --dtype bfloat16")
    return KernelUse("attention", SETS[has.instructions], _narrower(has))


def _narrower(has: Capabilities) -> str:
    """Which of SETS this chip lacks."""
    wider = SETS[has.instructions + 1 :]
    return f"this machine has no {wider[-1]}" if wider else ""


def choice_of(module: nn.Module) -> tuple[int, int] | None:
    """For how many pairs of size and rows `module` takes our product, and of how many; None: it has none."""
    layers = {
        (part.out_features, part.in_features): part
        for part in module.modules()
        if isinstance(part, PrepackedLinear) and part.block
    }
    chosen = sum(len(part.chosen) for part in layers.values())
    known = sum(len(part.known) for part in layers.values())
    return (chosen, known) if layers else None

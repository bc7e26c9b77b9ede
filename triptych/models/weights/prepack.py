"""Prepacked linear layers for CPUs: the weight is brought into oneDNN's layout once, not in every step.

A plain weight is brought into the blocks that the product works on each time it is multiplied; with the few
rows of a decode step that is a third of the time and more (`benchmarks/results/earlier.md`).
"""

from __future__ import annotations

import ast
import ctypes
import functools
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Collection
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.activations import GELUActivation, GELUTanh

from triptych.base.machine.pages import use_huge_pages
from triptych.base.progress import each
from triptych.kernels.cpu_linear import (
    BLOCKS,
    PLAIN,
    PLAIN_OUTS,
    gate,
    instructions_here,
    multiply,
    normalise,
)
from triptych.kernels.library import kernel_library
from triptych.models.weights.readers import read_elsewhere

#: Those of torch's compiler for CPUs: the only ones that take a dense input and a blocked weight.
_OPERATORS = ("_reorder_linear_weight", "_linear_pointwise")

#: Elements from which on a weight is worth it. A call of oneDNN costs 12 to 30 µs more than one of MKL, which
#: multiplies plain float32 weights, and bfloat16 goes through oneDNN either way.
MINIMUM = {torch.float32: 1 << 19, torch.bfloat16: 1 << 16}
#: In float32 where there are always many rows.
MIN_MANY_ROWS = 1 << 16


#: Rows that are measured, see `product_choice`; a number between two of them is served as the larger.
FEW_ROWS = (1, 2, 4, 8, 16, 32)
#: Where our kernel has tiles, those of prompts too; more than the last are served as the last.
ROWS = (*FEW_ROWS, 64, 256)
#: What the kernels call the instruction set with tiles, and inputs of a tile.
_TILES, _TILE_INPUTS = 4, 32


class PrepackedLinear(nn.Module):
    """A linear layer in place of an `nn.Linear`, with `weight` in oneDNN's layout; its `to_dense()` is W.

    Our own kernel multiplies few rows, where it knows the layout, which it does of bfloat16, and many rows
    where it has tiles for them: all of `known`, until `choose` says which.
    """

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = original.in_features, original.out_features
        self.bias = original.bias
        self._attr, self._algorithm = "none", ""
        plain = original.weight.detach()
        self._take(original.weight)
        has_kernels = kernel_library() is not None
        #: Outputs of a block of the weight as our kernel reads it; 0 where it does not.
        self.block = self._block(plain) if has_kernels else 0
        self._dtype = plain.dtype
        self._fuses = has_kernels and plain.dtype == torch.bfloat16
        self.choose(ROWS)

    def _take(self, weight: torch.Tensor) -> None:
        """Sets `weight`, and the address of its memory."""
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self.weight = nn.Parameter(blocked, requires_grad=False)
        self._address = torch.ops.mkldnn.data_ptr(blocked)
        use_huge_pages(self._address, torch.ops.mkldnn._nbytes(blocked))

    def _block(self, plain: torch.Tensor) -> int:
        return known_block(plain, self.weight.detach())

    @property
    def known(self) -> tuple[int, ...]:
        """Those of ROWS that our kernel multiplies at all."""
        tiles = instructions_here() >= _TILES and self.in_features % _TILE_INPUTS == 0
        return (ROWS if tiles else FEW_ROWS) if self.block else ()

    def choose(self, rows: Collection[int]) -> None:
        """From now on our kernel multiplies these of ROWS, if it is known to, and oneDNN all others."""
        self.chosen = tuple(count for count in self.known if count in rows)
        steps = pairwise((0, *ROWS))
        self._by_kernel = [False] + [high in self.chosen for low, high in steps for _ in range(high - low)]

    def fuses(self, x: torch.Tensor) -> bool:
        """Whether `multiply` takes these rows, with what stands beside the product."""
        return self._fuses and self._suit(x)

    def _suit(self, x: torch.Tensor) -> bool:
        alike = self._attr == "none" and x.dtype == self._dtype
        return alike and x.dim() == 2 and len(x) > 0 and x.stride(1) == 1

    def multiply(
        self,
        x: torch.Tensor,
        *,
        norm: nn.RMSNorm | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """The layer over x [rows, in_features], normalised by `norm` before.

        `residual` [rows, out_features] is added. `gated`: the result is SiLU of the first half of the
        outputs, times the second half. One call of our kernel does all, or several do what oneDNN does not.
        """
        weight, epsilon = (None, 0.0) if norm is None else (norm.weight, norm.eps or 0.0)
        if self._kernel_takes(x) and not (gated and self.out_features % (2 * self.block)):
            return multiply(
                x,
                self._address,
                self.out_features,
                self.block,
                bias=self.bias,
                norm=weight,
                epsilon=epsilon,
                residual=residual,
                gated=gated,
            )
        out = self._multiply(x if weight is None else normalise(x, weight, epsilon))
        if gated:
            out = gate(out)
        return out if residual is None else out.add_(residual)

    def _kernel_takes(self, x: torch.Tensor) -> bool:
        return self._by_kernel[min(len(x), ROWS[-1])]

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, self._attr, [], self._algorithm
        )
        return out

    def fuse_gelu(self, approximate: str) -> None:
        """From now on `forward` gives GELU of the product; `approximate` is torch's, "none" or "tanh"."""
        self._attr, self._algorithm = "gelu", approximate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features], in x's dtype."""
        return self.multiply(x) if self._suit(x) and self._kernel_takes(x) else self._multiply(x)


class TiedLinear(PrepackedLinear):
    """A linear layer whose weight is another module's too, such as a head that is the token embedding.

    A second copy would cost its memory: our kernel reads the weight as it lies, torch multiplies other rows.
    """

    def _take(self, weight: torch.Tensor) -> None:
        assert isinstance(weight, nn.Parameter)
        self.weight = weight
        self._address = weight.data_ptr()
        use_huge_pages(self._address, weight.nbytes)

    def _block(self, plain: torch.Tensor) -> int:
        return PLAIN

    @property
    def known(self) -> tuple[int, ...]:
        return FEW_ROWS

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)

    @staticmethod
    def takes(layer: nn.Linear) -> bool:
        """Whether our kernel multiplies this layer's weight as it lies."""
        weight = layer.weight
        whole = weight.shape[0] % PLAIN_OUTS == 0 and weight.shape[1] % 2 == 0
        return whole and weight.is_contiguous() and kernel_library() is not None


def known_block(weight: torch.Tensor, blocked: torch.Tensor) -> int:
    """Outputs of a block of `blocked`, where that has the weight as our kernel reads it; else 0.

    That is [outs / block][ins / 2][block][2].
    """
    (outs, ins), count = weight.shape, weight.numel()
    if weight.dtype != torch.bfloat16 or ins % 2 or torch.ops.mkldnn._nbytes(blocked) != weight.nbytes:
        return 0
    memory = (ctypes.c_char * weight.nbytes).from_address(torch.ops.mkldnn.data_ptr(blocked))
    stored = torch.frombuffer(memory, dtype=torch.int16, count=count)
    plain = weight.contiguous().view(torch.int16)
    for block in BLOCKS:
        if outs % block == 0:
            expected = plain.view(outs // block, block, ins // 2, 2).transpose(1, 2)
            if torch.equal(stored.view(expected.shape), expected):
                return block
    return 0


def can_prepack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this device multiplies blocked weights of this dtype."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in _OPERATORS):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype in MINIMUM


def prepack(module: nn.Module, *, many_rows: bool = False) -> None:
    """Puts a `PrepackedLinear` in the place of every linear layer that `can_prepack` and that is worth it.
    `many_rows`: as an encoder has them, not a decode step.

    A weight that is something else too, as a head that is the token embedding, stays as it lies: a second
    copy would cost its memory. A `TiedLinear` takes it where it can. One that other code reads stays.
    """
    read = read_elsewhere(module)
    holders = Counter(
        id(parameter) for part in module.modules() for parameter in part.parameters(recurse=False)
    )
    made: dict[int, PrepackedLinear] = {}
    # Names, not layers: what holds a layer that was copied keeps its plain weight in memory.
    chosen = [
        (parent, name)
        for parent in module.modules()
        for name, child in parent._modules.items()
        if type(child) is nn.Linear
        and id(child) not in read
        and (holders[id(child.weight)] == 1 or (not many_rows and TiedLinear.takes(child)))
        and can_prepack(child.weight.device, child.weight.dtype)
        and child.weight.numel() >= _minimum(child.weight, many_rows)
    ]
    if not chosen:
        return
    for parent, name in each("prepacking weights", chosen, "layers"):
        child = parent._modules[name]
        assert isinstance(child, nn.Linear)
        # A layer that two modules hold stays one.
        if id(child) not in made:
            kind = PrepackedLinear if holders[id(child.weight)] == 1 else TiedLinear
            made[id(child)] = kind(child)
        setattr(parent, name, made[id(child)])


def _minimum(weight: torch.Tensor, many_rows: bool) -> int:
    minimum = MINIMUM[weight.dtype]
    return min(minimum, MIN_MANY_ROWS) if many_rows else minimum


#: A linear layer, and the activation that its module applies to its outputs and to nothing else: Qwen3-VL's
#: blocks and mergers; CLIP, Whisper and BART.
_PAIRS = (("linear_fc1", "act_fn"), ("fc1", "activation_fn"))


def fuse_gelu(module: nn.Module) -> None:
    """Makes GELU a part of each prepacked layer that it follows: one oneDNN operator for both.

    On chips with AMX a GELU of its own, over four times the width, takes half as long as the product.
    Other activations stay as they are, and those of modules that do anything else with the outputs.
    """
    for part in list(module.modules()):
        for linear, activation in _PAIRS:
            layer = getattr(part, linear, None)
            approximate = _approximate(getattr(part, activation, None))
            if not isinstance(layer, PrepackedLinear) or approximate is None:
                continue
            kind: Any = type(part)
            if _follows(kind, linear, activation):
                layer.fuse_gelu(approximate)
                setattr(part, activation, nn.Identity())


@functools.cache
def _follows(kind: Any, linear: str, activation: str) -> bool:
    """Whether `forward`, by its source, gives all that the layer puts out to the activation alone."""
    try:
        source = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(kind.forward))))
    except (OSError, TypeError, SyntaxError):
        return False
    once = all(
        source.count(f"self.{name}(") == 1 == source.count(f"self.{name}") for name in (linear, activation)
    )
    nested = rf"self\.{activation}\(self\.{linear}\("
    in_turn = rf"(\w+) = self\.{linear}\(.*\)\n\s*\1 = self\.{activation}\(\1\)\n"
    return once and re.search(f"{nested}|{in_turn}", source) is not None


def _approximate(activation: object) -> str | None:
    """How a module approximates GELU, where it is one."""
    if isinstance(activation, nn.GELU):
        return activation.approximate
    if isinstance(activation, GELUTanh) and isinstance(activation.act, partial):
        return "tanh"
    if isinstance(activation, GELUActivation) and activation.act is functional.gelu:
        return "none"
    return None

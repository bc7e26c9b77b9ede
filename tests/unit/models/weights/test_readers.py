"""Layers whose weight other code reads, by the source of what is around them."""

from __future__ import annotations

from types import FunctionType

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.models.t5.modeling_t5 import T5Config, T5DenseGatedActDense

from triptych.models.fused.merged import MergedLinear, merge
from triptych.models.weights.prepack import PrepackedLinear, prepack
from triptych.models.weights.quantization import Int8Linear, quantize_linears
from triptych.models.weights.readers import read_elsewhere


class _Base(nn.Module):
    """Three layers of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.third = (nn.Linear(1024, 1024, bias=False) for _ in range(3))
        self.stack = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(x) + self.third(x)


class _Multiplies(_Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Not by calling self.left.weight."""
        return functional.linear(x, self.left.weight) + self.right(x) + self.third(x)


class _AsksDtype(_Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.left.weight.dtype)
        return self.left(x) + self.right(x) + self.third(x)


class _Stacked(_Base):
    @property
    def first(self) -> torch.Tensor:
        return self.stack[0].weight


def _chosen(module: nn.Module) -> nn.Linear:
    return module.right


class _Elsewhere(_Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, _chosen(self).weight)


class _Embeds(_Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.get_input_embeddings().weight.to(self.get_input_embeddings().weight.dtype)


class _ByArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Base()

    def forward(self, inner: _Base, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, inner.third.weight)


class _Building(_Base):
    _tied_weights_keys = {"left.weight": "right.weight"}

    def _init_weights(self) -> None:
        self.left.weight.data.zero_()


def names(module: nn.Module, *, dtypes: bool = False) -> set[str]:
    read = read_elsewhere(module, dtypes=dtypes)
    return {name for name, part in module.named_modules() if id(part) in read}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (_Base, set()),
        (_Building, set()),
        (_Multiplies, {"left"}),
        (_AsksDtype, set()),
        (_Stacked, {"stack.0", "stack.1"}),
        (_Elsewhere, {"left", "right", "third", "stack.0", "stack.1"}),
        (_ByArgument, {"inner.third"}),
        (_Embeds, set()),
    ],
)
def test_layers_that_other_code_reads_are_found_by_its_source(kind, expected):
    assert names(kind()) == expected


def test_a_class_without_a_source_may_read_every_layer() -> None:
    # As one that was made at run time, in no file.
    code = (lambda self, x: x @ self.left.weight).__code__.replace(co_filename="<made>")
    unseen = type("Unseen", (_Base,), {"forward": FunctionType(code, globals())})()
    assert names(unseen) == {"left", "right", "third", "stack.0", "stack.1"}


def test_a_layer_that_is_asked_for_its_dtype_may_be_packed_and_not_be_held_in_8_bits() -> None:
    module = _AsksDtype()
    assert names(module, dtypes=True) == {"left"}
    assert quantize_linears(module, []) == 4
    assert type(module.left) is nn.Linear and type(module.right) is Int8Linear
    assert names(T5DenseGatedActDense(T5Config(d_model=8, d_ff=8)), dtypes=True) == {"wo"}


def test_a_layer_that_is_read_is_neither_merged_nor_packed() -> None:
    module, x = _Multiplies(), torch.randn(2, 1024)
    expected = module(x)
    merge(module)
    assert type(module.left) is nn.Linear and isinstance(module.right, MergedLinear)
    prepack(module)
    assert type(module.left) is nn.Linear and isinstance(module.right.linear, PrepackedLinear)
    torch.testing.assert_close(module(x), expected)

"""A linear layer and its GELU in one operator: what it computes, what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from triptych.models.weights.prepack import PrepackedLinear, can_prepack, fuse_gelu, prepack

CPU = torch.device("cpu")
ERRORS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
DTYPES = [pytest.param(dtype, id=str(dtype)) for dtype in ERRORS if can_prepack(CPU, dtype)]


class Part(nn.Module):
    def __init__(self, activation: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.fc1 = nn.Linear(256, 512, dtype=dtype)
        self.activation_fn = activation
        self.fc2 = nn.Linear(512, 256, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(self.activation_fn(self.fc1(x)))
        return out


@pytest.mark.parametrize("rows", [0, 1, 37])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "activation",
    [nn.GELU, lambda: nn.GELU("tanh"), lambda: ACT2FN["gelu_pytorch_tanh"], lambda: ACT2FN["gelu"]],
)
def test_the_outputs_are_those_of_both_parts_and_no_name_changes(
    activation: Callable[[], nn.Module], dtype: torch.dtype, rows: int
) -> None:
    torch.manual_seed(0)
    part, x = Part(activation(), dtype), torch.randn(rows, 256).to(dtype)
    names = set(part.state_dict())
    with torch.inference_mode():
        wanted = part(x)
        prepack(part, many_rows=True)
        fuse_gelu(part)
        found = part(x)
    assert isinstance(part.activation_fn, nn.Identity) and set(part.state_dict()) == names
    torch.testing.assert_close(found, wanted, atol=ERRORS[dtype], rtol=ERRORS[dtype])


@pytest.mark.parametrize("approximate", ["none", "tanh"] if can_prepack(CPU, torch.float32) else [])
def test_both_ways_to_approximate_stay_apart(approximate: str) -> None:
    """They differ by up to 5e-4, more than what a product's rounding gives."""
    torch.manual_seed(0)
    linear, x = nn.Linear(256, 256), torch.randn(64, 256) * 3
    packed = PrepackedLinear(linear)
    packed.fuse_gelu(approximate)
    wanted = nn.functional.gelu(linear(x), approximate=approximate)
    torch.testing.assert_close(packed(x), wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["quick_gelu", "silu", "gelu_python", "gelu_python_tanh", "gelu_new"])
def test_other_activations_stay_as_they_are(name: str) -> None:
    part = Part(ACT2FN[name])
    prepack(part, many_rows=True)
    fuse_gelu(part)
    assert type(part.activation_fn) is type(ACT2FN[name])


def test_a_layer_that_is_not_prepacked_keeps_its_activation() -> None:
    part = Part(nn.GELU())
    fuse_gelu(part)
    assert type(part.activation_fn) is nn.GELU

"""Norms in one call of torch: which are, and what they give."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from triptych.models.fused.norms import fuse_norms


class AddsOne(LlamaRMSNorm):
    """Gemma's: the weight is what is added to 1."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * (1 + self.weight) / self.weight


class OtherEpsilon(LlamaRMSNorm):
    """Its epsilon is outside of the root."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        root = hidden_states.pow(2).mean(-1, keepdim=True).sqrt()
        return self.weight * hidden_states / (root + self.variance_epsilon)


class NoEpsilon(LlamaRMSNorm):
    """Only rows of tiny numbers tell."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden_states * hidden_states.pow(2).mean(-1, keepdim=True).rsqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [LlamaRMSNorm, T5LayerNorm])
@torch.no_grad()
def test_a_norm_of_that_formula_gives_the_same_numbers_and_keeps_its_weight(
    kind: type[nn.Module], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(64, eps=1e-5).to(dtype))
    weight = model[0].weight
    weight.normal_()
    x = torch.randn(3, 64).to(dtype) * torch.tensor([[1.0], [30.0], [3e-3]], dtype=dtype)
    wanted = model(x)
    fuse_norms(model)
    assert type(model[0]) is nn.RMSNorm and model[0].weight is weight
    error = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(model(x), wanted, atol=error, rtol=error)


@pytest.mark.parametrize(
    "norm",
    [
        AddsOne(64, eps=1e-5),
        OtherEpsilon(64, eps=1e-5),
        NoEpsilon(64, eps=1e-5),
        nn.LayerNorm(64, bias=False),
        nn.LayerNorm(64),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_a_norm_of_another_formula_stays(norm: nn.Module) -> None:
    model = nn.Sequential(norm)
    weight = norm.weight.clone()
    fuse_norms(model)
    assert model[0] is norm and torch.equal(norm.weight, weight)


def test_other_modules_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Embedding(4, 4), nn.Dropout())
    before = list(model)
    fuse_norms(model)
    assert all(now is then for now, then in zip(model, before, strict=True))

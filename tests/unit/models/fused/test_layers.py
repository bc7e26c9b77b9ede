"""Fused decoder layers and norms in the place of transformers' own: the same numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextDecoderLayer
from transformers.models.t5.modeling_t5 import T5LayerNorm

from support.data.checkpoints import build_checkpoint
from triptych.kernels.library import kernel_library
from triptych.models.fused.layers import FusedDecoderLayer, fuse_layers, fuse_norms
from triptych.models.fused.merged import merge
from triptych.models.registry import family_of
from triptych.models.weights import prepack

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "llava")
CPU = torch.device("cpu")


def _layers(family: str) -> nn.ModuleList:
    """transformers' own layers of a checkpoint, with projections merged and norms fused."""
    path = build_checkpoint(family)
    side = family_of(path).decoder.load(path, device=CPU, dtype=torch.float32, attn_implementation="sdpa")
    merge(side.module)
    fuse_norms(side.module)
    layers = side.module.model.language_model.layers
    assert isinstance(layers, nn.ModuleList)
    return layers


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_of_every_text_model_are_fused_with_the_weights_that_they_had(family: str) -> None:
    layers = _layers(family)
    before = {id(parameter) for parameter in layers.parameters()}
    fuse_layers(layers)
    assert all(isinstance(layer, FusedDecoderLayer) for layer in layers)
    assert [layer.layer_idx for layer in layers] == list(range(len(layers)))
    assert {id(parameter) for parameter in layers.parameters()} == before


@pytest.mark.skipif(
    kernel_library() is None or not prepack.can_prepack(CPU, torch.bfloat16), reason="no kernel"
)
@torch.no_grad()
def test_a_few_rows_of_bfloat16_pass_a_layer_in_four_products_with_the_numbers_of_float32(monkeypatch):
    config = AutoConfig.for_model("qwen3_vl").text_config
    sizes = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4, "head_dim": 32}
    for name, size in (sizes | {"num_key_value_heads": 2}).items():
        setattr(config, name, size)
    config._attn_implementation = "triptych_trial"
    generator = torch.Generator().manual_seed(0)
    layer = Qwen3VLTextDecoderLayer(config, 0).eval()
    for parameter in layer.parameters():
        parameter.normal_(0, 0.2, generator=generator).copy_(parameter.bfloat16())
    wide, narrow = (nn.ModuleList([copy.deepcopy(layer)]) for _ in range(2))
    narrow.bfloat16()
    for layers in (wide, narrow):
        merge(layers)
        fuse_norms(layers)
        fuse_layers(layers)
    monkeypatch.setitem(prepack.LEAST, torch.bfloat16, 1)
    prepack.prepack(narrow)
    hidden, angles = (torch.randn(*shape, generator=generator) for shape in ((5, 128), (2, 5, 1, 32)))
    products: list[int] = []
    inner = prepack.multiply
    monkeypatch.setattr(
        prepack, "multiply", lambda *args, **named: products.append(1) or inner(*args, **named)
    )
    found = narrow[0](hidden.bfloat16(), *angles.bfloat16(), [])
    assert len(products) == 4
    expected = wide[0](hidden.bfloat16().float(), *angles.bfloat16().float(), [])
    torch.testing.assert_close(found.float(), expected, atol=0.02 * float(expected.abs().max()), rtol=0.02)


class Scaled(Qwen3VLTextDecoderLayer):
    """Multiplies what a layer adds, as Granite does."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states + 0.9 * (super().forward(hidden_states, *args, **kwargs) - hidden_states)


class Windowed(Qwen3VLTextDecoderLayer):
    """Asks attention for something that the fused layer does not ask for."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(hidden_states, *args, softcap=30.0, **kwargs)


class Needy(Qwen3VLTextDecoderLayer):
    """Takes an argument that the text model gives it."""

    def forward(self, hidden_states: torch.Tensor, cache: object, **kwargs: Any) -> torch.Tensor:
        return super().forward(hidden_states, **kwargs)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Scaled, "other numbers"), (Windowed, "something else of attention"), (Needy, "cannot be tried")],
)
def test_layers_that_do_something_else_stay(kind, reason, caplog):
    layers = _layers("qwen3_vl")
    layers[-1].__class__ = kind
    with caplog.at_level("INFO", "triptych.models.fused.layers"):
        fuse_layers(layers)
    assert not any(isinstance(layer, FusedDecoderLayer) for layer in layers)
    assert reason in caplog.text


def test_layers_whose_projections_are_apart_stay() -> None:
    path = build_checkpoint("llava")
    side = family_of(path).decoder.load(path, device=CPU, dtype=torch.float32, attn_implementation="sdpa")
    layers = side.module.model.language_model.layers
    fuse_layers(layers)
    assert not any(isinstance(layer, FusedDecoderLayer) for layer in layers)


def test_norms_of_q_and_k_that_differ_in_epsilon_or_size_stay() -> None:
    for change in ({"eps": 1e-3}, {"normalized_shape": (32,)}):
        layers = _layers("qwen3_vl")
        for name, value in change.items():
            setattr(layers[0].self_attn.k_norm, name, value)
        fuse_layers(layers)
        assert not any(isinstance(layer, FusedDecoderLayer) for layer in layers)


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
def test_a_norm_of_that_formula_gives_the_same_numbers_and_keeps_its_weight(kind, dtype):
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

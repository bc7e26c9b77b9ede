"""Fused decoder layers in the place of transformers' own: the same numbers, or no fused layers at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextDecoderLayer

from support.data.checkpoints import build_checkpoint
from triptych.models.fused.decoder_layer import FusedDecoderLayer
from triptych.models.fused.layers import fuse_layers
from triptych.models.fused.merged import merge
from triptych.models.fused.norms import fuse_norms
from triptych.models.registry import family_of

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
def test_layers_that_do_something_else_stay(
    kind: type[nn.Module], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
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

"""A text model is run without its own forward only where that does nothing else around the layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

from support.engine.reference_attention import NAME
from triptych.models.base import MergedEmbeds
from triptych.models.fused.layers import FusedDecoderLayer, fuse_layers, fuse_norms
from triptych.models.fused.merged import merge
from triptych.models.fused.text_model import FusedTextModel, check_text_model

HIDDEN = 32
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "attn_implementation": NAME,
}  # fmt: skip


def fused(model: Any, *, levels: int = 0) -> str:
    """Why the layers of `model` stay; empty if they do not."""
    merge(model)
    fuse_norms(model)

    def own(
        embeds: torch.Tensor, positions: torch.Tensor, merged: MergedEmbeds, attention: object
    ) -> torch.Tensor:
        first = merged.rows[:, :HIDDEN]
        out = model(
            inputs_embeds=embeds.index_copy(0, merged.index, first)[None],
            position_ids=positions,
            use_cache=False,
            attn_metadata=attention,
        )
        return out.last_hidden_state[0]

    def check(layers: Any) -> None:
        check_text_model(model, layers, own, hidden_size=HIDDEN, position_rows=1, levels=levels)

    return fuse_layers(model.layers, check)


class Scaled(LlamaModel):
    """Multiplies the embeddings, as Granite does."""

    def forward(self, inputs_embeds: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(inputs_embeds=inputs_embeds * 1.5, **kwargs)


class Skips(LlamaModel):
    """Runs its layers in another order."""

    def forward(self, **kwargs: Any) -> Any:
        layers, self.layers = self.layers, nn.ModuleList(reversed(self.layers))
        try:
            return super().forward(**kwargs)
        finally:
            self.layers = layers


class Twice(LlamaModel):
    """Goes through its layers twice."""

    def forward(self, inputs_embeds: torch.Tensor, **kwargs: Any) -> Any:
        once = super().forward(inputs_embeds=inputs_embeds, **kwargs).last_hidden_state
        return super().forward(inputs_embeds=once, **kwargs)


class Telling(LlamaModel):
    """Gives its layers something else."""

    def forward(self, **kwargs: Any) -> Any:
        return super().forward(temperature=torch.ones(1), **kwargs)


class Silent(LlamaModel):
    """Keeps from its layers what attention needs."""

    def forward(self, attn_metadata: object = None, **kwargs: Any) -> Any:
        return super().forward(**kwargs)


class Shifted(LlamaModel):
    """Counts positions from 1."""

    def forward(self, position_ids: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(position_ids=position_ids + 1, **kwargs)


@pytest.mark.parametrize("model", [LlamaModel, Qwen2Model])
@torch.no_grad()
def test_layers_after_llamas_pattern_are_fused_with_what_is_around_them(model):
    config = (Qwen2Config if model is Qwen2Model else LlamaConfig)(**SIZES)
    plain = model(config).eval()
    ours = model(config).eval()
    ours.load_state_dict(plain.state_dict())
    assert fused(ours) == ""
    assert all(isinstance(layer, FusedDecoderLayer) for layer in ours.layers)
    assert FusedTextModel(ours, HIDDEN, 1)._layers is ours.layers


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Scaled, "something else between its layers"),
        (Skips, "something else between its layers"),
        (Twice, "something else between its layers"),
        (Telling, "is given temperature"),
        (Silent, "is not given what attention needs"),
        (Shifted, "other cos and sin"),
    ],
)
def test_a_text_model_that_does_something_else_around_its_layers_keeps_them(kind, reason):
    model = kind(LlamaConfig(**SIZES)).eval()
    assert reason in fused(model)
    assert not any(isinstance(layer, FusedDecoderLayer) for layer in model.layers)
    # Of the trial nothing is left.
    assert not any("forward" in vars(layer) for layer in model.layers)


def test_heads_that_are_rotated_in_part_stay() -> None:
    config = LlamaConfig(**SIZES)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    model = LlamaModel(config).eval()
    # As classes that know the factor: cos and sin are narrower than a head.
    model.rotary_emb.inv_freq = model.rotary_emb.inv_freq[:2]
    assert "rotates a part of a head" in fused(model)


def test_levels_that_the_model_does_not_add_are_noticed() -> None:
    assert "something else" in fused(LlamaModel(LlamaConfig(**SIZES)).eval(), levels=2)


def test_a_text_model_without_the_parts_of_llamas_keeps_its_layers() -> None:
    model = LlamaModel(LlamaConfig(**SIZES)).eval()
    model.final = model._modules.pop("norm")
    assert "has no norm" in fused(model)

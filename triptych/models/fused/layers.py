"""Fused decoder layers in the place of transformers' own, where both give the same numbers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedConfig

from triptych.models.fused.decoder_layer import FusedDecoderLayer, rotary
from triptych.models.fused.merged import merge
from triptych.models.fused.norms import fuse_norms

logger = logging.getLogger(__name__)

#: The attention function of a trial.
_TRIAL = "triptych_trial"
#: Sizes of a trial, small and all different.
_SIZES = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
_ERROR = 1e-4


def fuse_layers(layers: nn.ModuleList) -> None:
    """Puts a `FusedDecoderLayer` in the place of each layer; of none where one would give other numbers.

    That is tried with small layers of the same classes and config. Projections are merged and norms fused
    before.
    """
    try:
        fused = [FusedDecoderLayer(layer) for layer in layers]
        for layer, ours in zip(layers, fused, strict=True):
            _try(type(layer), ours.config, ours.layer_idx)
    except ValueError as error:
        logger.info("the decoder's layers are transformers' own: %s", error)
        return
    for index, ours in enumerate(fused):
        layers[index] = ours


@torch.no_grad()
def _try(kind: type[nn.Module], config: PreTrainedConfig, index: int) -> None:
    """ValueError unless a fused layer does the same as one of `kind`, the attention function included."""
    config = copy.deepcopy(config)
    for name, size in _SIZES.items():
        setattr(config, name, size)
    config._attn_implementation = _TRIAL
    generator = torch.Generator().manual_seed(index)
    try:
        layer = kind(config, index).float().eval()
        for parameter in layer.parameters():
            parameter.normal_(0, 0.5, generator=generator)
        ours = copy.deepcopy(layer)
        merge(ours)
        fuse_norms(ours)
        fused = FusedDecoderLayer(ours)
        hidden = torch.randn(5, config.hidden_size, generator=generator)
        angles = torch.randn(2, 1, 5, config.head_dim, generator=generator)
        asked: list[Mapping[str, Any]] = []
        expected = layer(hidden[None], position_embeddings=tuple(angles), attn_metadata=asked)
        result = fused(hidden, *rotary((angles[0], angles[1])), asked)
    except (TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{kind.__name__} cannot be tried: {error}") from error
    alike = result.shape == expected[0].shape
    off = (result - expected[0]).abs().max() / expected[0].abs().max() if alike else 1.0
    if not off < _ERROR:
        raise ValueError(f"{kind.__name__} {index} gives other numbers, off by {float(off):.1g}")
    if len(asked) != 2 or asked[0] != asked[1]:
        raise ValueError(f"{kind.__name__} {index} asks something else of attention: {asked}")


def _attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **asked: Any
) -> tuple[torch.Tensor, None]:
    """Plain causal attention; what it was asked for besides goes into the list that is `attn_metadata`."""
    options = asked.pop("attn_metadata")
    options.append({name: value for name, value in asked.items() if value})
    out = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=asked.get("scaling"), enable_gqa=True
    )
    return out.transpose(1, 2), None


AttentionInterface.register(_TRIAL, _attend)

"""Dense attention for the decoder sides of encoder-decoder models, and their logits over whole prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from triptych.models.base import DecoderSide

NAME = "reference_encdec"


@dataclass(frozen=True)
class DenseBatch:
    """Flattened prompts: their lengths, and per prompt the cross keys and values of every layer."""

    lengths: list[int]
    cross: list[list[tuple[torch.Tensor, torch.Tensor]]]
    bias: torch.Tensor | None


def dense(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    attn_metadata: DenseBatch,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, T, dim]; key and value like it, or None where the item's own are attended to."""
    assert attention_mask is None and scaling is not None
    outputs, first = [], 0
    for length, cross in zip(attn_metadata.lengths, attn_metadata.cross, strict=True):
        q = query[0, :, first : first + length]
        if getattr(module, "is_cross", False):
            assert key is None and value is None
            k, v = (part.transpose(0, 1) for part in cross[module.layer_idx])
            scores = (q @ k.transpose(1, 2)) * scaling
        else:
            assert key is not None and value is not None
            k, v = (part[0, :, first : first + length] for part in (key, value))
            scores = (q @ k.transpose(1, 2)) * scaling
            bias = attn_metadata.bias
            if bias is not None:
                at = torch.arange(length)
                distances = at[:, None] - at[None]
                scores = scores + bias[:, distances.clamp(0, bias.shape[1] - 1)]
            future = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        outputs.append(scores.softmax(-1) @ v)
        first += length
    return torch.cat(outputs, dim=1).transpose(0, 1)[None], None


AttentionInterface.register(NAME, dense)


def decoder_logits(
    decoder: DecoderSide, prompts: Sequence[Sequence[int]], rows: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Logits [len(prompt), vocabulary] of each prompt over its item's rows, all in one flattened batch."""
    ids = torch.tensor([token for prompt in prompts for token in prompt])
    positions = torch.cat([decoder.positions(list(prompt), [])[0] for prompt in prompts], dim=1)
    batch = DenseBatch(
        [len(prompt) for prompt in prompts], [decoder.project_cross(item) for item in rows], decoder.bias
    )
    hidden = decoder.forward(decoder.embed(ids), positions, None, batch)
    return list(decoder.logits(hidden).split(batch.lengths))

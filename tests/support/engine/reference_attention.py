"""Attention over one whole prompt, or several behind one another: dense, causal, without a cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

NAME = "reference_dense"


def dense_causal(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    attn_metadata: list[int],
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`attn_metadata` holds the lengths of the flattened prompts. A mask would mean a registered name."""
    assert attention_mask is None
    repeats = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    outputs = []
    for q, k, v in zip(*(tensor.split(attn_metadata, dim=2) for tensor in (query, key, value)), strict=True):
        scores = (q @ k.transpose(2, 3)) * scale
        length = q.shape[2]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        outputs.append(scores.masked_fill(future, float("-inf")).softmax(-1) @ v)
    return torch.cat(outputs, dim=2).transpose(1, 2), None


AttentionInterface.register(NAME, dense_causal)


def written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    allowed: torch.Tensor,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """[Q, heads, dim] of query [Q, heads, dim], key and value [K, kv_heads, dim], as the formula says it.

    `allowed` is bool [Q, K]; `bias` [heads, Q, K]; `sinks` [heads] are the scores of keys without values.
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(query), 1)), -1)
    weights = scores.softmax(-1)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", weights, value)

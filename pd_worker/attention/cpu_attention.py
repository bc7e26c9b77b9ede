"""Attention on a CPU by the kernel in C++: keys and values are read in their blocks, and not gathered."""

from __future__ import annotations

import numpy as np
import torch

from triptych.kernels import cpu_attention as kernel
from triptych.models.geometry import LayerRule, SpanRule
from triptych.pd_worker.attention.metadata import AttentionMetadata


def attend_on_cpu(
    query: torch.Tensor,
    layer: int,
    meta: AttentionMetadata,
    rule: LayerRule,
    scale: float,
    softcap: float | None,
    out: torch.Tensor,
) -> None:
    """Writes `out` [T, heads, value dim] of query [heads, T, dim]: all decodes and chunks in one call."""
    cache = meta.cache
    if meta.sequences is None:
        meta.sequences = _sequences(meta)
    if rule not in meta.bounds:
        meta.bounds[rule] = key_bounds(meta, rule)
    rows = cache.key_rows[layer][0], cache.value_rows[layer][0]
    cap = softcap or 0.0
    kernel.attend(
        query, *rows, cache.block_size, meta.sequences, meta.bounds[rule], out, scale=scale, softcap=cap
    )


def _sequences(meta: AttentionMetadata) -> kernel.Sequences:
    last = meta.prefills[-1].last if meta.prefills else meta.num_decodes
    starts = [*range(meta.num_decodes), *(span.first for span in meta.prefills), last]
    return kernel.Sequences.of(starts, [*meta.decode_tables, *(span.table for span in meta.prefills)])


def key_bounds(meta: AttentionMetadata, rule: LayerRule) -> np.ndarray:
    """The keys [first, last) of its sequence that each token of the batch attends to, int32 [T, 2]."""
    chunks = [np.arange(span.start, span.end) for span in meta.prefills]
    at = np.concatenate([meta.decode_lengths.numpy() - 1, *chunks])
    first, last = np.zeros_like(at), at + 1
    if rule.window is not None:
        first = np.maximum(first, at - rule.window + 1)
    if rule.chunk is not None:
        first = np.maximum(first, at // rule.chunk * rule.chunk)
    for span in meta.prefills if rule.spans is not SpanRule.NONE else ():
        for begin, end in span.atomic:
            offset = span.first - span.start
            rows = slice(offset + max(begin, span.start), offset + max(min(end, span.end), span.start))
            last[rows] = min(end, span.end)
            if rule.spans is SpanRule.WHOLE:
                first[rows] = np.minimum(first[rows], begin)
            elif rule.chunk is not None:
                last[rows] = np.minimum(last[rows], (at[rows] // rule.chunk + 1) * rule.chunk)
    return np.stack((first, last), 1).astype(np.int32)

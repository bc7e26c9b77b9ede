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
    *,
    sinks: torch.Tensor | None,
    cross: bool,
) -> None:
    """Writes `out` [T, heads, value dim] of query [heads, T, dim]: all decodes and chunks in one call."""
    cache, key = meta.cache, None if cross else rule
    if key not in meta.sequences:
        meta.sequences[key] = _cross_sequences(meta) if cross else (_sequences(meta), key_bounds(meta, rule))
    blocks = cache.keys[layer], cache.values[layer]
    bias = None if cross or meta.bias is None else meta.bias.float()
    cap = softcap or 0.0
    kernel.attend(query, *blocks, *meta.sequences[key], out, scale=scale, softcap=cap, bias=bias, sinks=sinks)


def _sequences(meta: AttentionMetadata) -> kernel.Sequences:
    last = meta.prefills[-1].last if meta.prefills else meta.num_decodes
    starts = [*range(meta.num_decodes), *(span.first for span in meta.prefills), last]
    return kernel.Sequences.of(starts, [*meta.decode_tables, *(span.table for span in meta.prefills)])


def _cross_sequences(meta: AttentionMetadata) -> tuple[kernel.Sequences, np.ndarray]:
    """Decodes side by side that share an encoder output are one sequence: its rows are read once."""
    cross = meta.cross
    assert cross is not None
    tables, rows = cross.decode_tables, cross.decode_lengths.numpy()
    numbers = tables.numpy()
    firsts = [
        index for index in range(meta.num_decodes)
        if not index or rows[index] != rows[index - 1] or (numbers[index] != numbers[index - 1]).any()
    ]  # fmt: skip
    last = meta.prefills[-1].last if meta.prefills else meta.num_decodes
    starts = [*firsts, *(span.first for span in meta.prefills), last]
    bounds = np.zeros((last, 2), np.int32)
    bounds[: meta.num_decodes, 1] = rows
    for span, encoded in zip(meta.prefills, cross.prefills, strict=True):
        bounds[span.first : span.last, 1] = encoded.rows
    read = [*(tables[first] for first in firsts), *(span.table for span in cross.prefills)]
    return kernel.Sequences.of(starts, read), bounds


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

"""Attention on CUDA by the Triton kernel: keys and values are read in their blocks, and not gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from triptych.base.machine.device import Device
from triptych.models.geometry import LayerRule, SpanRule
from triptych.pd_worker.attention.metadata import AttentionMetadata, PrefillSpan

if TYPE_CHECKING:
    from triptych.kernels.paged_attention import PagedQueries


def attend_in_blocks(
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
    """Writes `out` [T, heads, value dim] of query [heads, T, dim]: all decodes, then all prefill chunks."""
    # Where Triton is, torch for CUDA has brought it.
    from triptych.kernels import paged_attention as kernel

    scores = kernel.PagedScores(scale, softcap or 0.0, causal=False, sinks=sinks)
    if not cross:
        whole, limits = rule.spans is SpanRule.WHOLE, (rule.window or 0, rule.chunk or 0)
        scores = kernel.PagedScores(
            scale, softcap or 0.0, *limits, whole_spans=whole, bias=meta.bias, sinks=sinks
        )
    spans = not cross and rule.spans is not SpanRule.NONE
    cached = (meta.cache.keys[layer], meta.cache.values[layer])
    for queries in queries_of(meta, cross=cross, spans=spans):
        kernel.attend(query.transpose(0, 1), *cached, queries, scores, out)


def queries_of(meta: AttentionMetadata, *, cross: bool, spans: bool) -> Sequence[PagedQueries]:
    """The step's decodes and its chunks, as far as there are any; made once for all layers."""
    key = (cross, spans)
    if key not in meta.queries:
        parts = _decodes(meta, cross) if meta.num_decodes else None, _chunks(meta, cross, spans)
        meta.queries[key] = [part for part in parts if part is not None]
    return meta.queries[key]


def _decodes(meta: AttentionMetadata, cross: bool) -> PagedQueries:
    from triptych.kernels.paged_attention import PagedQueries

    tables = meta.cross if cross and meta.cross is not None else meta
    device = meta.slots.device
    starts = torch.arange(meta.num_decodes + 1, device=device)
    processors = Device.of(device).processors
    return PagedQueries(starts, tables.decode_lengths, tables.decode_tables, 1, processors=processors)


def _chunks(meta: AttentionMetadata, cross: bool, spans: bool) -> PagedQueries | None:
    from triptych.kernels.paged_attention import PagedQueries

    if not meta.prefills:
        return None
    encoded = meta.cross.prefills if cross and meta.cross is not None else None
    tables = [part.table for part in encoded or meta.prefills]
    starts = [*(span.first for span in meta.prefills), meta.prefills[-1].last]
    lengths = [part.rows for part in encoded] if encoded else [span.end for span in meta.prefills]
    device = Device.of(meta.slots.device)
    numbers = device.upload(torch.tensor([*starts, *lengths]))
    return PagedQueries(
        numbers[: len(starts)],
        numbers[len(starts) :],
        torch.nn.utils.rnn.pad_sequence(tables, batch_first=True),
        max(span.last - span.first for span in meta.prefills),
        device.upload(_span_bounds(meta.prefills)) if spans and _both_ways(meta.prefills) else None,
    )


def _both_ways(prefills: Sequence[PrefillSpan]) -> bool:
    return any(a < span.end and b > span.start for span in prefills for a, b in span.atomic)


def _span_bounds(prefills: Sequence[PrefillSpan]) -> torch.Tensor:
    """[T, 2]: the positions from and to which each token of the batch attends both ways, else 0 and 0."""
    bounds = torch.zeros(prefills[-1].last, 2, dtype=torch.int64)
    for span in prefills:
        for a, b in span.atomic:
            first, last = max(a, span.start), min(b, span.end)
            offset = span.first - span.start
            bounds[offset + first : offset + max(first, last)] = torch.tensor([a, b])
    return bounds

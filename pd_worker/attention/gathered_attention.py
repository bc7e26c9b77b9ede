"""Attention by torch, for devices and dtypes without a kernel of ours: keys and values are gathered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from triptych.models.geometry import LayerRule
from triptych.pd_worker.attention.metadata import AttentionMetadata


def attend_gathered(
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
    """Writes `out` [T, heads, value dim] of query [heads, T, dim], one sequence after the other.

    Decodes whose numbers of blocks the host does not know are computed at once: they are those of a graph.
    """
    keys, values = meta.cache.keys[layer], meta.cache.values[layer]
    table = None if cross else meta.bias

    def attend(rows: slice, tables: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> None:
        count = len(tables)
        k, v = _gather(keys, tables), _gather(values, tables)
        mask = mask[..., : k.shape[2]]
        k, v = k[:, :, : mask.shape[-1]], v[:, :, : mask.shape[-1]]
        bias = None if table is None else _bias(table, positions, k.shape[2])
        q = query[:, rows].unflatten(1, (count, -1)).transpose(0, 1)
        part = _attend(q, k, v, mask, bias, sinks, scale, softcap)
        out[rows] = part.transpose(1, 2).flatten(0, 1)

    if meta.num_decodes:
        tables = meta.cross if cross and meta.cross is not None else meta
        mask = meta.cross_mask() if cross else meta.decode_mask(rule)
        at = meta.decode_lengths[:, None] - 1
        for rows, blocks in _decodes(meta.num_decodes, tables.decode_blocks):
            attend(rows, tables.decode_tables[rows, :blocks], mask[rows], at[rows])
    for index, span in enumerate(meta.prefills):
        rows, at = slice(span.first, span.last), torch.arange(span.start, span.end, device=query.device)[None]
        if cross and meta.cross is not None:
            encoded = meta.cross.prefills[index]
            every = torch.ones(1, encoded.rows, dtype=torch.bool, device=query.device)
            attend(rows, encoded.table[None], every, at)
        else:
            attend(rows, span.table[None], meta.prefill_mask(index, rule), at)


def _decodes(count: int, blocks: Sequence[int]) -> Iterator[tuple[slice, int | None]]:
    """One by one with the blocks of each, or all at once where they are not known."""
    if not blocks:
        yield slice(0, count), None
    for index, number in enumerate(blocks):
        yield slice(index, index + 1), number


def _gather(blocks: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """[D, kv_heads, tokens, dim] of the blocks in `tables` [D, n]; in memory ordered as the cache."""
    (count, n), (_, size, heads, dim) = tables.shape, blocks.shape
    if blocks.is_contiguous():
        return blocks.index_select(0, tables.flatten()).view(count, n * size, heads, dim).transpose(1, 2)
    gathered = blocks.permute(2, 0, 1, 3).index_select(1, tables.flatten())
    return gathered.view(heads, count, n * size, dim).transpose(0, 1)


def _bias(table: torch.Tensor, positions: torch.Tensor, keys: int) -> torch.Tensor:
    """[D, heads, q, keys] of queries at `positions` [D, q], by a bias's table."""
    at, behind = positions[..., None], torch.arange(keys, device=positions.device)
    by_distance = table.dim() == 2
    bias = table[:, (at - behind).clamp(0, table.shape[1] - 1)] if by_distance else table[:, at, behind]
    return bias.transpose(0, 1)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """[D, heads, Q, value dim]; `mask` is True where a key is attended to, broadcast to [D, heads, Q, K].

    Every kv head becomes a batch entry, whose keys and values the query heads of its group share: with
    `enable_gqa` and a mask, CUDA has only the kernel that materializes all scores.
    """
    (count, heads, queries, _), (_, kv_heads, keys, _) = q.shape, k.shape
    added = mask if bias is None else bias.to(q.dtype).masked_fill(~mask, float("-inf"))
    if sinks is not None:
        # One more key and value of zeros; the key's score is what is added to it.
        k, v, keys = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), keys + 1
        if bias is None:
            added = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
        added = added.expand(count, heads, queries, keys - 1)
        added = torch.cat((added, sinks.to(q.dtype)[:, None, None].expand(count, -1, queries, 1)), -1)
    if added.dim() > 2:
        added = added.expand(count, heads, queries, keys).reshape(count * kv_heads, -1, queries, keys)
    grouped = q.reshape(count * kv_heads, heads // kv_heads, queries, q.shape[3])
    k, v = (x.flatten(0, 1)[:, None].expand(-1, grouped.shape[1], -1, -1) for x in (k, v))
    if softcap is None:
        result = F.scaled_dot_product_attention(grouped, k, v, added, scale=scale)
    else:
        # No kernel of torch takes a soft cap.
        scores = torch.tanh((grouped @ k.mT).float() * (scale / softcap)) * softcap
        scores = scores.masked_fill(~added, float("-inf")) if added.dtype == torch.bool else scores + added
        result = scores.softmax(-1).to(v.dtype) @ v
    return result.reshape(count, heads, queries, v.shape[3])

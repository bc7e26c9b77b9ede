"""Attention over paged keys and values, as an attention function of transformers.

One flattened ragged batch per step: first the sequences that compute one token, then the prefill chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from transformers import AttentionInterface

from triptych.kernels.cpu_attention import takes
from triptych.models.geometry import LayerRule
from triptych.pd_worker.attention.backends import AttentionCall, attend, fused, whole_bias
from triptych.pd_worker.attention.block_attention import attend_in_blocks
from triptych.pd_worker.attention.cpu_attention import attend_on_cpu
from triptych.pd_worker.attention.metadata import (
    AttentionMetadata,
    CrossSpan,
    CrossTables,
    GatherGroup,
    PrefillSpan,
)
from triptych.pd_worker.attention.paged_kv_cache import PagedKVCache

__all__ = [
    "ATTENTION_NAME",
    "AttentionMetadata",
    "CrossSpan",
    "CrossTables",
    "PagedKVCache",
    "PrefillSpan",
    "paged_attention",
]

#: The name to load a decoder with.
ATTENTION_NAME = "triptych_paged"
#: Keywords of features that this function does not support; they are refused, never ignored.
_UNSUPPORTED = ("s_aux", "position_bias", "attention_bias", "block_mask", "score_mod", "head_mask")


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    attn_metadata: AttentionMetadata | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, T, dim], key and value [1, kv_heads, T, dim] to [1, T, heads, dim of the values].

    Or [T, heads, 1, dim] and [T, kv_heads, 1, dim] to [T, 1, heads, dim].

    A module with `is_cross` attends to the cross tables; its key and value are ignored.
    NotImplementedError for options of the model that are not supported.
    """
    if len(query) > 1:
        # One token of each sequence, as recurrent layers need them.
        q, k, v = query.transpose(0, 2), key.transpose(0, 2), value.transpose(0, 2)
        how = (attention_mask, scaling, dropout, sliding_window, softcap, attn_metadata)
        out, _ = paged_attention(module, q, k, v, *how, **kwargs)  # type: ignore[arg-type]
        return out.transpose(0, 1), None
    _refuse_unsupported(attention_mask, dropout, attn_metadata, kwargs)
    assert attn_metadata is not None
    meta, q = attn_metadata, query[0]
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    cache = meta.cache
    keys, values = cache.keys[layer], cache.values[layer]
    rule = meta.layer_rules[layer] if meta.layer_rules else LayerRule(sliding_window)
    options = _Options(q.shape[-1] ** -0.5 if scaling is None else scaling, softcap, rule)
    out = torch.empty(q.shape[1], q.shape[0], values.shape[-1], dtype=q.dtype, device=q.device)
    cross = meta.cross is not None and bool(getattr(module, "is_cross", False))
    if not cross:
        if kwargs.get("is_causal") is False:
            raise NotImplementedError(f"{ATTENTION_NAME} is causal")
        cache.write(layer, meta.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    if meta.backend == "triton":
        attend_in_blocks(module, q, layer, meta, options.rule, options.scale, softcap, out, cross=cross)
    elif cross:
        _cross(q, keys, values, meta, options, out)
    elif meta.backend == "cpu" and meta.bias is None and takes(q.dtype):
        attend_on_cpu(q, layer, meta, options.rule, options.scale, softcap, out)
    else:
        if meta.num_decodes:
            _decode(module, q, layer, meta, options, out)
        for index, span in enumerate(meta.prefills):
            rows = slice(span.first, span.last)
            out[rows] = _prefill(module, q[:, rows], keys, values, meta, index, options)
    return out[None], None


@dataclass(frozen=True, slots=True)
class _Options:
    scale: float
    softcap: float | None
    rule: LayerRule


def _refuse_unsupported(
    attention_mask: torch.Tensor | None,
    dropout: float,
    attn_metadata: AttentionMetadata | None,
    kwargs: Mapping[str, object],
) -> None:
    if attn_metadata is None:
        raise NotImplementedError(f"{ATTENTION_NAME} needs attn_metadata")
    if attention_mask is not None or dropout:
        raise NotImplementedError(f"{ATTENTION_NAME} does not support attention_mask and dropout")
    asked = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    # A bias made for a flattened batch has no meaning here; the metadata's bias, by positions, replaces it.
    if asked == ["position_bias"] and attn_metadata.bias is not None:
        return
    if asked:
        raise NotImplementedError(f"{ATTENTION_NAME} does not support {', '.join(asked)}")


def _decode(
    module: torch.nn.Module,
    q: torch.Tensor,
    layer: int,
    meta: AttentionMetadata,
    options: _Options,
    out: torch.Tensor,
) -> None:
    """All one-token sequences, into `out` [T, heads, dim], gathered group by group."""
    groups = meta.groups
    for group in groups:
        tables = meta.decode_tables[group.first : group.last, : group.blocks]
        keys = _gather(meta.cache.keys[layer], tables)
        values = _gather(meta.cache.values[layer], tables)
        bias = None
        if meta.bias is not None:
            bias = _bound_bias(module, meta, -1, keys.shape[1], group, keep=len(groups) == 1)
        part = q[:, group.first : group.last]
        mask = _part_of(meta.decode_mask(options.rule, _added(q, meta, options)), group, keys)
        out[group.first : group.last] = _attend_decodes(part, keys, values, mask, options, meta, bias)


def _by_kernel(meta: AttentionMetadata, options: _Options) -> bool:
    """Whether torch's attention computes it, if no bias is added."""
    return options.softcap is None and meta.backend in ("sdpa", "cpu")


def _added(q: torch.Tensor, meta: AttentionMetadata, options: _Options) -> torch.dtype | None:
    """The dtype of a mask that is added to the scores; None where a bool is needed."""
    return q.dtype if meta.bias is None and _by_kernel(meta, options) else None


def _part_of(mask: torch.Tensor | None, group: GatherGroup, keys: torch.Tensor) -> torch.Tensor | None:
    """The part of the mask for one group's decodes and their keys."""
    return None if mask is None else mask[group.first : group.last, ..., : keys.shape[2]]


def _cross(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    meta: AttentionMetadata,
    options: _Options,
    out: torch.Tensor,
) -> None:
    """Cross-attention of the batch, into `out` [T, heads, dim]."""
    assert meta.cross is not None
    if meta.num_decodes:
        out[: meta.num_decodes] = _cross_decode(q, keys, values, meta, options)
    for span, encoded in zip(meta.prefills, meta.cross.prefills, strict=True):
        part = q[:, span.first : span.last]
        out[span.first : span.last] = _cross_span(part, keys, values, encoded, options, meta)


def _cross_decode(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, meta: AttentionMetadata, options: _Options
) -> torch.Tensor:
    assert meta.cross is not None
    if not meta.cross.decodes:
        outputs = []
        for group in meta.cross.groups:
            tables = meta.cross.decode_tables[group.first : group.last, : group.blocks]
            k, v = _gather(keys, tables), _gather(values, tables)
            mask = _part_of(meta.cross_mask(q.dtype if _by_kernel(meta, options) else None), group, k)
            part = q[:, group.first : group.last]
            outputs.append(_attend_decodes(part, k, v, mask, options, meta, None))
        return torch.cat(outputs)
    out = torch.empty(meta.num_decodes, q.shape[0], q.shape[2], dtype=q.dtype, device=q.device)
    for span in meta.cross.decodes:
        out[span.tokens] = _cross_span(q[:, span.tokens], keys, values, span, options, meta)
    return out


def _attend_decodes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    options: _Options,
    meta: AttentionMetadata,
    bias: _BoundBias | None,
) -> torch.Tensor:
    """[D, heads, dim] of q [heads, D, dim]; the query heads of a kv head become rows."""
    count, kv_heads, dim = k.shape[0], k.shape[1], k.shape[3]
    packed = q.transpose(0, 1).reshape(count, kv_heads, -1, dim)
    out = _attend(packed, k, v, mask, options, meta, bias)
    return out.reshape(count, -1, v.shape[3])


def _gather(blocks: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """[D, kv_heads, tokens, dim] of the blocks in `tables` [D, n]; in memory ordered as the cache."""
    (count, n), (_, size, heads, dim) = tables.shape, blocks.shape
    if blocks.is_contiguous():
        return blocks.index_select(0, tables.flatten()).view(count, n * size, heads, dim).transpose(1, 2)
    gathered = blocks.permute(2, 0, 1, 3).index_select(1, tables.flatten())
    return gathered.view(heads, count, n * size, dim).transpose(0, 1)


def _prefill(
    module: torch.nn.Module,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    meta: AttentionMetadata,
    index: int,
    options: _Options,
) -> torch.Tensor:
    """[chunk, heads, dim] of one sequence."""
    span = meta.prefills[index]
    k = _gather(keys, span.table[None])[:, :, : span.end]
    v = _gather(values, span.table[None])[:, :, : span.end]
    mask = meta.prefill_mask(index, options.rule, _added(q, meta, options))
    bias = None if meta.bias is None else _bound_bias(module, meta, index, None)
    return _attend(q[None], k, v, mask, options, meta, bias, causal=mask is None)[0].transpose(0, 1)


def _cross_span(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    span: CrossSpan,
    options: _Options,
    meta: AttentionMetadata,
) -> torch.Tensor:
    """[n, heads, dim] of queries [heads, n, dim] over all rows of one encoder output."""
    k, v = _rows(keys, span), _rows(values, span)
    return _attend(q[None], k, v, None, options, meta, None)[0].transpose(0, 1)


def _rows(blocks: torch.Tensor, span: CrossSpan) -> torch.Tensor:
    """[1, kv_heads, rows, dim]; a view where the blocks are contiguous."""
    if span.first is None:
        return _gather(blocks, span.table[None])[:, :, : span.rows]
    start = span.first * blocks.shape[1]
    return blocks.flatten(0, 1)[start : start + span.rows].transpose(0, 1)[None]


@dataclass(frozen=True, slots=True)
class _BoundBias:
    """The bias of one call, computed by blocks of keys; with `keep` other layers reuse it under `key`."""

    key: tuple[object, int]
    keep: bool
    of: Callable[[int, int], torch.Tensor]


def _bound_bias(
    module: torch.nn.Module,
    meta: AttentionMetadata,
    index: int,
    kv_heads: int | None,
    group: GatherGroup | None = None,
    *,
    keep: bool = True,
) -> _BoundBias | None:
    """The bias of decodes (-1), those of `group`, or of prefill `index`; None where the module has none.

    With `kv_heads` the query heads of a kv head become rows, as in `_attend_decodes`.
    """
    assert meta.bias is not None
    bias, name = meta.bias, meta.bias.key(module)
    if name is None:
        return None
    queries, positions = meta.bias_positions(index)
    if group is not None:
        queries, positions = queries[group.first : group.last], positions[group.first : group.last]

    def of(first: int, last: int) -> torch.Tensor:
        added = bias.of(module, queries, positions[:, first:last])
        return added if kv_heads is None else added.reshape(added.shape[0], kv_heads, -1, last - first)

    return _BoundBias((name, index), keep, of)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    options: _Options,
    meta: AttentionMetadata,
    bias: _BoundBias | None,
    *,
    causal: bool = False,
) -> torch.Tensor:
    if bias is None and _by_kernel(meta, options):
        # The usual case.
        return fused(q, k, v, mask, causal=causal, scale=options.scale)
    of = None if bias is None else bias.of
    call = AttentionCall(q, k, v, options.scale, mask, causal, options.softcap, of)
    if bias is not None and meta.backend != "blockwise":
        added = meta.biases.get(bias.key)
        if added is None:
            added = whole_bias(call)
        if bias.keep:
            meta.biases[bias.key] = added
        call = replace(call, added=added)
    return attend(meta.backend, call)


AttentionInterface.register(ATTENTION_NAME, paged_attention)

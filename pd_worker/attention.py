"""Attention over paged keys and values, as an attention function of transformers.

One flattened ragged batch per step: first the sequences that compute one token, then the prefill chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

#: The name to load a decoder with.
ATTENTION_NAME = "triptych_paged"
#: Keywords by which models ask for what this function does not do: never ignored.
_UNSUPPORTED = ("s_aux", "position_bias", "attention_bias", "block_mask", "score_mod", "head_mask")


class PagedKVCache:
    """Keys and values of all layers: [num_blocks, block_size, num_kv_heads, head_dim] each."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        self.block_size = block_size
        # Zeros: what a padded gather reads must never be NaN, masked or not.
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores key and value [T, num_kv_heads, head_dim] at `slots` [T]."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, key)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, value)


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """One sequence's chunk: batch tokens [first, last), positions [start, start + last - first).

    `table` [blocks] covers all its positions so far. `atomic` spans, in positions, attend both ways.
    """

    first: int
    last: int
    start: int
    table: torch.Tensor
    atomic: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.last - self.first


@dataclass(slots=True)
class AttentionMetadata:
    """One step's batch, the same for every layer.

    `slots` [T] say where each token's key and value go. The first `num_decodes` batch tokens are one
    sequence each: their blocks are `decode_tables` [D, blocks], padded with any block, their lengths, the
    new token included, `decode_lengths` [D].
    """

    cache: PagedKVCache
    slots: torch.Tensor
    num_decodes: int
    decode_tables: torch.Tensor
    decode_lengths: torch.Tensor
    prefills: Sequence[PrefillSpan]
    #: Lengths differ or do not fill their blocks, so that the gathered keys hold strangers.
    decode_padded: bool = True
    _masks: dict[tuple[int, int | None], torch.Tensor | None] = field(default_factory=dict)

    def decode_mask(self, window: int | None) -> torch.Tensor | None:
        """Bool [D, 1, 1, blocks * block_size], True where a key counts; None when all do."""
        key = (-1, window)
        if key not in self._masks:
            self._masks[key] = self._decode_mask(window)
        return self._masks[key]

    def _decode_mask(self, window: int | None) -> torch.Tensor | None:
        if window is None and not self.decode_padded:
            return None
        size = self.decode_tables.shape[1] * self.cache.block_size
        position = torch.arange(size, device=self.decode_tables.device)[None]
        lengths = self.decode_lengths[:, None]
        mask = position < lengths
        if window is not None:
            mask &= position >= lengths - window
        return mask[:, None, None]

    def prefill_mask(self, index: int, window: int | None) -> torch.Tensor | None:
        """Bool [queries, keys] of prefill `index`; None when plain causal from position 0."""
        key = (index, window)
        if key not in self._masks:
            self._masks[key] = self._prefill_mask(self.prefills[index], window)
        return self._masks[key]

    def _prefill_mask(self, span: PrefillSpan, window: int | None) -> torch.Tensor | None:
        if span.start == 0 and not span.atomic and (window is None or window >= span.end):
            return None
        query = torch.arange(span.start, span.end, device=self.slots.device)[:, None]
        key = torch.arange(span.end, device=self.slots.device)[None]
        mask = key <= query
        if window is not None:
            mask &= key > query - window
        for start, end in span.atomic:
            mask |= (query >= start) & (query < end) & (key >= start) & (key < end)
        return mask


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
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, T, dim], key and value [1, kv_heads, T, dim] to [1, T, heads, dim].

    NotImplementedError for anything that a model asks for and this function would have to ignore.
    """
    _refuse_unsupported(attention_mask, dropout, attn_metadata, kwargs)
    assert attn_metadata is not None
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    cache = attn_metadata.cache
    cache.write(layer, attn_metadata.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    keys, values = cache.keys[layer], cache.values[layer]
    options = _Options(scaling, softcap, sliding_window)
    q = query[0]
    out = torch.empty(q.shape[1], q.shape[0], q.shape[2], dtype=q.dtype, device=q.device)
    if attn_metadata.num_decodes:
        out[: attn_metadata.num_decodes] = _decode(q, keys, values, attn_metadata, options)
    for index, span in enumerate(attn_metadata.prefills):
        out[span.first : span.last] = _prefill(
            q[:, span.first : span.last], keys, values, attn_metadata, index, options
        )
    return out[None], None


@dataclass(frozen=True, slots=True)
class _Options:
    scaling: float | None
    softcap: float | None
    window: int | None


def _refuse_unsupported(
    attention_mask: torch.Tensor | None,
    dropout: float,
    attn_metadata: AttentionMetadata | None,
    kwargs: dict[str, Any],
) -> None:
    if attn_metadata is None:
        raise NotImplementedError(f"{ATTENTION_NAME} needs attn_metadata")
    if attention_mask is not None or dropout:
        raise NotImplementedError(f"{ATTENTION_NAME} takes no attention mask and no dropout")
    if kwargs.get("is_causal") is False:
        raise NotImplementedError(f"{ATTENTION_NAME} is causal")
    asked = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if asked:
        raise NotImplementedError(f"{ATTENTION_NAME} does not support {', '.join(asked)}")


def _decode(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, meta: AttentionMetadata, options: _Options
) -> torch.Tensor:
    """[D, heads, dim]: all one-token sequences at once, the query heads of a kv head as its rows."""
    count, kv_heads, dim = meta.num_decodes, keys.shape[2], keys.shape[3]
    packed = q[:, :count].transpose(0, 1).reshape(count, kv_heads, -1, dim)
    k = _gather(keys, meta.decode_tables)
    v = _gather(values, meta.decode_tables)
    out = _attend(packed, k, v, meta.decode_mask(options.window), options)
    return out.reshape(count, -1, dim)


def _gather(blocks: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """[D, kv_heads, tokens, dim] of the blocks in `tables` [D, n]."""
    count, n = tables.shape
    gathered = blocks.index_select(0, tables.flatten())
    return gathered.view(count, n * blocks.shape[1], blocks.shape[2], blocks.shape[3]).transpose(1, 2)


def _prefill(
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
    mask = meta.prefill_mask(index, options.window)
    return _attend(q[None], k, v, mask, options, causal=mask is None)[0].transpose(0, 1)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    options: _Options,
    *,
    causal: bool = False,
) -> torch.Tensor:
    gqa = q.shape[1] != k.shape[1]
    if options.softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=options.scaling, enable_gqa=gqa
        )
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scale = q.shape[-1] ** -0.5 if options.scaling is None else options.scaling
    scores = torch.tanh((q @ k.transpose(-1, -2)).float() * scale / options.softcap) * options.softcap
    if causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1).to(v.dtype) @ v


AttentionInterface.register(ATTENTION_NAME, paged_attention)

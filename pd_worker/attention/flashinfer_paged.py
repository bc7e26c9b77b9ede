"""FlashInfer over the paged KV cache: one call a layer for all decodes and prefill chunks, without a gather.

A KV block is a page of FlashInfer's "NHD" layout as it is. Opt-in, for CUDA, and it has never run on a GPU:
on a CPU its tests replace the package by its documented arithmetic (`flashinfer-python` 0.7.2). What
FlashInfer has no kernel for, a bias or an atomic span, goes the way of "sdpa".
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch

from triptych.errors import ConfigError
from triptych.models.base import DecoderSide
from triptych.pd_worker.attention.metadata import AttentionMetadata
from triptych.pd_worker.attention.paged_kv_cache import PagedKVCache

#: Values of a head that FlashInfer has kernels for.
HEAD_DIMS = (64, 128, 256)
#: Bytes of the buffer for partial results, as its documentation recommends; all wrappers of a cache share it.
_WORKSPACE = 128 << 20


def check_flashinfer(decoder: DecoderSide) -> None:
    """ConfigError where FlashInfer cannot compute this decoder on its device."""
    head_dim = decoder.geometry.head_dim
    dtype = str(decoder.dtype).removeprefix("torch.")
    reason = ""
    if decoder.device.type != "cuda":
        reason = f"runs on CUDA only, and the device is {decoder.device}"
    elif importlib.util.find_spec("flashinfer") is None:
        reason = "needs the package flashinfer-python: install it"
    elif decoder.dtype not in (torch.float16, torch.bfloat16):
        reason = f"computes in 16 bits only, and --dtype is {dtype}: give --dtype bfloat16"
    elif head_dim not in HEAD_DIMS:
        reason = f"has no kernel for heads of {head_dim} values, only for {', '.join(map(str, HEAD_DIMS))}"
    if reason:
        raise ConfigError(f"--attention-backend flashinfer {reason}; or give --attention-backend sdpa")


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """A step's sequences as FlashInfer takes them: int32, on the host but for `pages`.

    Sequence i has the queries [query_starts[i], query_starts[i + 1]) of the batch and the pages
    [page_starts[i], page_starts[i + 1]) of `pages`; the last of them holds `last_page_tokens[i]` keys.
    """

    query_starts: torch.Tensor
    page_starts: torch.Tensor
    pages: torch.Tensor
    last_page_tokens: torch.Tensor


def paged_batch(
    counts: Sequence[int], lengths: Sequence[int], tables: Sequence[torch.Tensor], page_size: int
) -> PagedBatch:
    """Sequences with `counts` queries over `lengths` keys; their tables may be longer than that."""
    pages = [-(-length // page_size) for length in lengths]
    last = [length - (count - 1) * page_size for length, count in zip(lengths, pages, strict=True)]
    used = [table[:count] for table, count in zip(tables, pages, strict=True)]
    return PagedBatch(_starts(counts), _starts(pages), torch.cat(used).int(), _int32(last))


def of_self(meta: AttentionMetadata) -> PagedBatch:
    """Decodes and prefill chunks over their own keys; the new ones are written."""
    spans = meta.prefills
    return paged_batch(
        [1] * meta.num_decodes + [span.last - span.first for span in spans],
        [*meta.decode_lengths.tolist(), *(span.end for span in spans)],
        [*meta.decode_tables, *(span.table for span in spans)],
        meta.cache.block_size,
    )


def of_cross(meta: AttentionMetadata) -> PagedBatch:
    """The same queries over the rows of their encoder outputs."""
    cross = meta.cross
    assert cross is not None
    return paged_batch(
        [1] * meta.num_decodes + [span.last - span.first for span in meta.prefills],
        [*cross.decode_lengths.tolist(), *(span.rows for span in cross.prefills)],
        [*cross.decode_tables, *(span.table for span in cross.prefills)],
        meta.cache.block_size,
    )


def takes(meta: AttentionMetadata, module: torch.nn.Module) -> bool:
    """Whether FlashInfer has a kernel for this layer's attention of the step to itself."""
    biased = meta.bias is not None and meta.bias.key(module) is not None
    return not biased and not any(span.atomic for span in meta.prefills)


def paged_self_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> torch.Tensor:
    """[T, heads, dim] of query [heads, T, dim] over one layer's keys and values, the cache's."""
    plan: dict[str, Any] = {"causal": True, "sm_scale": scale, "logits_soft_cap": softcap}
    # FlashInfer counts the keys before the query, the query's own not among them.
    plan["window_left"] = -1 if window is None else window - 1
    return _run(("self", window, softcap), query, keys, values, meta, plan)


def paged_cross_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """[T, heads, dim] of query [heads, T, dim]: every token over the rows of its encoder output."""
    plan: dict[str, Any] = {"causal": False, "sm_scale": scale, "logits_soft_cap": softcap}
    return _run(("cross", softcap), query, keys, values, meta, plan)


def _run(
    kind: tuple[object, ...],
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    meta: AttentionMetadata,
    options: dict[str, Any],
) -> torch.Tensor:
    """The layer's output; the first layer of this `kind` in a step plans for all of them."""
    key = ("flashinfer", *kind)
    if key not in meta.plans:
        batch = of_self(meta) if kind[0] == "self" else of_cross(meta)
        wrapper = _wrapper(meta.cache, key)
        wrapper.plan(
            batch.query_starts, batch.page_starts, batch.pages, batch.last_page_tokens,
            query.shape[0], keys.shape[2], query.shape[2], meta.cache.block_size,
            q_data_type=query.dtype, kv_data_type=keys.dtype, **options,
        )  # fmt: skip
        meta.plans[key] = wrapper
    planned: Any = meta.plans[key]
    out: torch.Tensor = planned.run(query.transpose(0, 1).contiguous(), (keys, values))
    return out


#: Of each cache: its workspace, and the wrappers, which keep a step's plan while all layers use it.
_wrappers: WeakKeyDictionary[PagedKVCache, dict[object, Any]] = WeakKeyDictionary()


def _wrapper(cache: PagedKVCache, key: object) -> Any:
    known = _wrappers.setdefault(cache, {})
    if "workspace" not in known:
        known["workspace"] = torch.empty(_WORKSPACE, dtype=torch.uint8, device=cache.keys[0].device)
    if key not in known:
        package = importlib.import_module("flashinfer")
        known[key] = package.BatchPrefillWithPagedKVCacheWrapper(known["workspace"], "NHD")
    return known[key]


def _starts(counts: Sequence[int]) -> torch.Tensor:
    return _int32([0, *accumulate(counts)])


def _int32(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)

"""Attention run by run on a CPU: torch's fused kernel over slices of the cache, merged by log-sum-exp.

Query heads that share keys are rows of one call. Nothing is gathered, padded, masked or copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from triptych.models.base import DecoderSide
from triptych.pd_worker.attention.metadata import KVRun

#: Not part of torch's public interface: where a release has none, decodes and chunks are gathered.
_KERNEL = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def uses_runs(backend: str, decoder: DecoderSide) -> bool:
    """Whether attention reads runs where they are: on a CPU, by torch's fused kernel, without a bias."""
    on_cpu = decoder.device.type == "cpu" and _KERNEL is not None
    return on_cpu and backend == "sdpa" and decoder.bias is None


def attend_decodes(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    runs: Sequence[Sequence[KVRun]],
    scale: float,
) -> torch.Tensor:
    """[D, heads, dim] of one query per sequence, [D, heads, dim], over its runs, at least one for each.

    `keys` and `values` are the rows of a layer's cache, [1, kv_heads, slots, dim].
    """
    count, heads, dim = query.shape
    packed = query.reshape(count, 1, keys.shape[1], -1, dim)
    outputs: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    for rows, ranges in zip(packed.unbind(), runs, strict=True):
        for first, last in ranges:
            k, v = keys[:, :, first:last], values[:, :, first:last]
            out, log_sum = _attend(rows, k, v, scale=scale)
            outputs.append(out)
            sums.append(log_sum)
    parts, start = [], 0
    for number, group in groupby(runs, len):
        stop = start + number * sum(1 for _ in group)
        parts.append(_merged(outputs[start:stop], sums[start:stop], number))
        start = stop
    merged = parts[0] if len(parts) == 1 else torch.cat(parts)
    return merged.reshape(count, heads, dim)


def attend_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: Sequence[tuple[torch.Tensor, torch.Tensor]],
    scale: float,
) -> torch.Tensor:
    """[n, heads, dim] of a chunk of one sequence: causal in itself, and over all that is before it.

    `query` is [heads, n, dim]; `key` and `value` [kv_heads, n, dim] are the chunk's own. `context` has the
    keys and values before it in parts, [1, kv_heads, tokens, dim] each.
    """
    (heads, count, dim), kv_heads = query.shape, key.shape[0]
    groups = heads // kv_heads
    # Every kv head is a batch entry, whose keys its query heads share without a copy.
    rows = query.reshape(kv_heads, groups, count, dim)
    own = [part[:, None].expand(-1, groups, -1, -1) for part in (key, value)]
    out, log_sum = _attend(rows, *own, causal=True, scale=scale)
    packed = rows.reshape(1, kv_heads, groups * count, dim)
    for k, v in context:
        more, its_sum = _attend(packed, k, v, scale=scale)
        its_sum = its_sum.reshape(log_sum.shape)
        share = torch.sigmoid(its_sum - log_sum)[..., None].to(out.dtype)
        out = torch.lerp(out, more.reshape(out.shape), share)
        log_sum = torch.logaddexp(log_sum, its_sum)
    return out.reshape(heads, count, dim).transpose(0, 1)


def _merged(outputs: Sequence[torch.Tensor], sums: Sequence[torch.Tensor], number: int) -> torch.Tensor:
    """[n, kv_heads, groups, dim] of `number` outputs of each sequence, by their shares of the scores."""
    out = torch.cat(list(outputs))
    if number == 1:
        return out
    shares = torch.cat(list(sums)).unflatten(0, (-1, number)).softmax(1)
    weighted: torch.Tensor = out.unflatten(0, (-1, number)).float() * shares[..., None]
    return weighted.sum(1).to(out.dtype)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool = False, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [B, heads, Q, dim], and the log-sum-exp of its scores [B, heads, Q] in float32."""
    assert _KERNEL is not None
    out, log_sum = _KERNEL(query, key, value, 0.0, causal, scale=scale)
    return out, log_sum

"""Attention backends: a Triton kernel on CUDA, our own on a CPU, torch's fused kernel, and blockwise.

"triton" (`block_attention`) and "cpu" (`cpu_attention`) read keys and values in their blocks; the others take
them gathered. Where the model adds a bias, and for cross-attention, "cpu" is "sdpa".
"sdpa" takes masks and biases as whole tensors, made once per step for all layers that share them. "blockwise"
makes them for one block of keys at a time and allocates nothing of the size queries x keys: for long
sequences with a bias. A call that a backend does not support goes to one that supports it; nothing is
ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from triptych.base.errors import ConfigError
from triptych.kernels.library import kernel_library

#: Values of --attention-backend.
BACKENDS = ("auto", "triton", "cpu", "sdpa", "blockwise")
#: Keys of one block of "blockwise".
_BLOCK = 256


def backend_on(device: torch.device, name: str) -> str:
    """The backend that this --attention-backend is on a device; ConfigError where it has none such."""
    if name == "triton" and device.type != "cuda":
        raise ConfigError("--attention-backend triton is for CUDA: use auto, which is cpu on a CPU")
    if name == "cpu" and (device.type != "cpu" or kernel_library() is None):
        raise ConfigError(
            "--attention-backend cpu is for a CPU, and needs g++ or a wheel with kernels: use auto"
        )
    if name != "auto":
        return name
    if device.type == "cuda":
        return "triton" if find_spec("triton") is not None else "sdpa"
    return "cpu" if device.type == "cpu" and kernel_library() is not None else "sdpa"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Queries [B, heads, Q, dim] over keys and values [B, kv_heads, K, dim].

    `mask` is bool, to be broadcast to [B, heads, Q, K], True where a key is attended to; None: all
    are, or with `causal` those up to the query's own index. `bias(first, last)` is the bias of these keys,
    [B, heads, Q, last - first]; `added` the whole bias with the mask in it, where it is computed already.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    mask: torch.Tensor | None = None
    causal: bool = False
    softcap: float | None = None
    bias: Callable[[int, int], torch.Tensor] | None = None
    added: torch.Tensor | None = None


def attend(backend: str, call: AttentionCall) -> torch.Tensor:
    """[B, heads, Q, dim] in the values' dtype."""
    # No kernel of torch takes a soft cap.
    return _blockwise(call) if backend == "blockwise" or call.softcap is not None else _sdpa(call)


def whole_bias(call: AttentionCall) -> torch.Tensor:
    """Bias and mask of all keys as one tensor that is added to the scores, [B, heads, Q, K]."""
    assert call.bias is not None
    mask = call.mask if call.mask is not None else _causal_mask(call)
    added = call.bias(0, call.key.shape[2]).to(call.query.dtype)
    return added if mask is None else added.masked_fill(~mask, float("-inf"))


def _causal_mask(call: AttentionCall) -> torch.Tensor | None:
    if not call.causal:
        return None
    size = (call.query.shape[2], call.key.shape[2])
    return torch.ones(size, dtype=torch.bool, device=call.query.device).tril()


def _sdpa(call: AttentionCall) -> torch.Tensor:
    mask = call.mask
    if call.bias is not None:
        mask = whole_bias(call) if call.added is None else call.added
    causal = call.causal and mask is None
    return fused(call.query, call.key, call.value, mask, causal=causal, scale=call.scale)


def fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """[B, heads, Q, dim] by torch's attention; `mask` is bool, or added, and broadcast to [B, heads, Q, K].

    Without `enable_gqa`: on CUDA, with a mask, only the kernel that materializes all scores supports it.
    Instead every kv head becomes a batch entry, whose keys and values all query heads of its group share.
    """
    (batch, heads, queries, dim), (_, kv_heads, keys, _) = query.shape, key.shape
    if heads == kv_heads:
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scale)
    groups, entries = heads // kv_heads, batch * kv_heads
    if mask is not None and mask.dim() == 4:
        mask = mask.expand(batch, heads, queries, keys) if mask.shape[:2] != (1, 1) else mask[0, 0]
    if mask is not None and mask.dim() == 4:
        mask = mask.reshape(entries, groups, queries, keys)
    out = F.scaled_dot_product_attention(
        query.reshape(entries, groups, queries, dim),
        key.reshape(entries, 1, keys, dim).expand(-1, groups, -1, -1),
        value.reshape(entries, 1, keys, value.shape[3]).expand(-1, groups, -1, -1),
        mask,
        is_causal=causal,
        scale=scale,
    )
    return out.reshape(batch, heads, queries, value.shape[3])


def _repeated(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values repeated so that each query head has its own."""
    repeats = call.query.shape[1] // call.key.shape[1]
    if repeats == 1:
        return call.key, call.value
    return call.key.repeat_interleave(repeats, 1), call.value.repeat_interleave(repeats, 1)


def _scores(call: AttentionCall, key: torch.Tensor) -> torch.Tensor:
    """The scores in float32, soft-capped."""
    scores = (call.query @ key.transpose(-1, -2)).float() * call.scale
    return scores if call.softcap is None else torch.tanh(scores / call.softcap) * call.softcap


def _blockwise(call: AttentionCall) -> torch.Tensor:
    """Attention by a running softmax over blocks of keys, with mask and bias of one block at a time."""
    key, value = _repeated(call)
    queries, keys = call.query.shape[2], key.shape[2]
    shape = (*call.query.shape[:3], 1)
    highest = torch.full(shape, float("-inf"), device=call.query.device)
    total = torch.zeros(shape, device=call.query.device)
    out = torch.zeros(*shape[:3], value.shape[3], device=call.query.device)
    index = torch.arange(queries, device=call.query.device)[:, None]
    for first in range(0, keys, _BLOCK):
        last = min(first + _BLOCK, keys)
        scores = _scores(call, key[:, :, first:last])
        if call.bias is not None:
            scores = scores + call.bias(first, last).float()
        if call.mask is not None:
            scores = scores.masked_fill(~call.mask[..., first:last], float("-inf"))
        elif call.causal:
            behind = torch.arange(first, last, device=index.device) > index
            scores = scores.masked_fill(behind, float("-inf"))
        now = torch.maximum(highest, scores.amax(-1, keepdim=True))
        # Where the block is fully masked, the sums stay zero.
        safe = now.masked_fill(now == float("-inf"), 0.0)
        weights = torch.exp(scores - safe)
        shrink = torch.exp(highest - safe)
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + weights @ value[:, :, first:last].float()
        highest = now
    return (out / total).to(value.dtype)

"""FlexAttention kernel: masks and biases are computed per score and never stored.

On CUDA it is compiled with dynamic sizes of batch, queries and keys, so that a model needs two graphs for its
own attention, and two more with a bias. Elsewhere the same functions run uncompiled, over the whole
score matrix: slow, and the reference of the compiled kernel.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention import flex_attention as flex

from triptych.models.base import BiasTable
from triptych.pd_worker.attention.key_ranges import BLOCK, KeyRanges

logger = logging.getLogger(__name__)

#: Least size of a batch: torch.compile specializes a size of 1.
MIN_BATCH = 2


@dataclass(frozen=True, slots=True)
class FlexCall:
    """Queries [B, heads, Q, dim] over keys and values [B, kv_heads, K, dim]; K is a multiple of BLOCK.

    With `heads_in_rows` a query's rows are the heads of one token, as in a batch of decodes. `blocks` are
    those of `ranges`.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    ranges: KeyRanges
    blocks: tuple[torch.Tensor, torch.Tensor]
    scale: float
    softcap: float | None = None
    bias: BiasTable | None = None
    heads_in_rows: bool = False


def is_compiled(device: torch.device) -> bool:
    return device.type == "cuda"


def attend(call: FlexCall) -> torch.Tensor:
    """[B, heads, Q, dim]."""
    if not is_compiled(call.query.device):
        return _uncompiled(call)
    _mark_dynamic(call)
    try:
        return _run(compiled(), call)
    except FailOnRecompileLimitHit:
        # Not expected, since no model needs that many graphs; the result is the same.
        logger.warning(
            "FlexAttention runs uncompiled from now on: torch's limit of recompilations is reached",
            exc_info=True,
        )
        return _uncompiled(call)


def _run(kernel: Callable[..., torch.Tensor], call: FlexCall) -> torch.Tensor:
    """Calls `_kernel`, compiled or not."""
    return kernel(
        call.query,
        call.key,
        call.value,
        call.ranges.first,
        call.ranges.last,
        call.ranges.position,
        *call.blocks,
        None if call.bias is None else call.bias.table,
        None if call.bias is None else call.bias.at,
        call.scale,
        call.softcap,
        call.heads_in_rows,
    )


def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    position: torch.Tensor,
    block_counts: torch.Tensor,
    block_indices: torch.Tensor,
    table: torch.Tensor | None,
    at: Callable[..., torch.Tensor] | None,
    scale: float,
    softcap: float | None,
    heads_in_rows: bool,
) -> torch.Tensor:
    rows = query.shape[2]

    def seen(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k >= first[b, q]) & (k < last[b, q])

    def score(
        value: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        if softcap is not None:
            value = torch.tanh(value / softcap) * softcap
        if table is None or at is None:
            return value
        head = h * rows + q if heads_in_rows else h
        return value + at(table, head, position[b, q], k)

    mask = flex.BlockMask.from_kv_blocks(
        block_counts,
        block_indices,
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(rows, key.shape[2]),
        compute_q_blocks=False,
    )
    out = flex.flex_attention(
        query, key, value, score, mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    assert isinstance(out, torch.Tensor)
    return out


@functools.cache
def compiled() -> Callable[..., torch.Tensor]:
    """`_kernel` compiled as a whole graph; an error, not a slow fallback, where torch cannot."""
    made: Callable[..., torch.Tensor] = torch.compile(_kernel, fullgraph=True)
    return made


def _mark_dynamic(call: FlexCall) -> None:
    """Marks the dynamic sizes; heads, head_dim and the rows of a decode are static."""
    tensors = (call.query, call.key, call.value)
    ranges = (call.ranges.first, call.ranges.last, call.ranges.position)
    if call.heads_in_rows:
        for tensor in (*tensors, *ranges, *call.blocks):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    else:
        for tensor, size in (call.query, 2), *((part, 1) for part in ranges), *((p, 2) for p in call.blocks):
            torch._dynamo.maybe_mark_dynamic(tensor, size)
    for tensor, size in (call.key, 2), (call.value, 2), (call.blocks[1], 3):
        torch._dynamo.maybe_mark_dynamic(tensor, size)


def _uncompiled(call: FlexCall) -> torch.Tensor:
    """Runs the kernel without compilation, without torch's warning and tracing at every call."""
    # For the whole process; compiled kernels ignore it.
    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    groups = call.query.shape[1] // call.key.shape[1]
    # `enable_gqa` saves time only when compiled.
    key, value = (
        tensor[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for tensor in (call.key, call.value)
    )
    return _run(_kernel, replace(call, key=key, value=value))

"""Shares of a model's heads, columns and vocabulary per rank. Plain numbers."""

from __future__ import annotations

from dataclasses import replace

from triptych.models.base import CrossGeometry, DecoderGeometry, DecoderSide
from triptych.models.parallel.plan import ShardPlan
from triptych.models.parallel.tensor_parallel import TensorParallel

#: Feed-forward columns and vocabulary are divided in multiples of so many, as kernels like it.
_UNIT = 16


def columns(count: int, rank: int, size: int) -> tuple[int, int]:
    """First and last of `count` columns that a rank has, nearly as many as every other, in multiples of 16.

    Together the ranks have all, each once; the last multiple may be short.
    """
    unit = _UNIT if count >= _UNIT * size else 1
    units = -(-count // unit)
    return min(count, unit * (units * rank // size)), min(count, unit * (units * (rank + 1) // size))


def heads(plan: ShardPlan, rank: int, size: int) -> tuple[int, int]:
    """First and last of the attention heads that a rank has."""
    each = plan.heads // size
    return each * rank, each * (rank + 1)


def kv_heads(plan: ShardPlan, rank: int, size: int) -> tuple[int, int]:
    """First and last of the KV heads that a rank's attention heads read."""
    if plan.kv_heads % size == 0:
        each = plan.kv_heads // size
        return each * rank, each * (rank + 1)
    first = rank * plan.kv_heads // size
    return first, first + 1


def geometry_of_rank(whole: DecoderGeometry, parallel: TensorParallel) -> DecoderGeometry:
    """The geometry of one rank: its heads and KV heads, all else whole."""
    kv = max(1, whole.num_kv_heads // parallel.size)
    return replace(whole, num_heads=whole.num_heads // parallel.size, num_kv_heads=kv)


def cross_of_rank(whole: CrossGeometry, parallel: TensorParallel) -> CrossGeometry:
    """The cross-attention of one rank: its KV heads."""
    return replace(whole, num_kv_heads=max(1, whole.num_kv_heads // parallel.size))


def take_share(side: DecoderSide, parallel: TensorParallel) -> None:
    """Makes the geometry of a side whose weights are one rank's share that of the share."""
    side.geometry = geometry_of_rank(side.geometry, parallel)
    if side.cross is not None:
        side.cross = cross_of_rank(side.cross, parallel)

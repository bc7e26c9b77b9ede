"""Attention over a paged cache on a CPU, as one call of the kernel for all sequences of a step."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from triptych.kernels.library import kernel_library, raise_for

#: Instruction sets: 0 what every CPU has, 1 AVX2, 2 AVX-512, 3 with bfloat16. The CPU's own limit holds, too.
WIDEST = 3
_BYTES = {torch.float32: 4, torch.bfloat16: 2}


class _Call(ctypes.Structure):
    """AttentionCall of attention.h."""

    _fields_ = [
        ("query", ctypes.c_void_p),
        ("query_head", ctypes.c_int64),
        ("query_token", ctypes.c_int64),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("key_head", ctypes.c_int64),
        ("value_head", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("bounds", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("sequences", "kv_heads", "groups", "dim", "value_dim")),
        *((name, ctypes.c_int32) for name in ("block_size", "bytes", "instructions", "threads")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("bias", ctypes.c_void_p),
        ("bias_head", ctypes.c_int64),
        ("bias_token", ctypes.c_int64),
        ("distances", ctypes.c_int32),
        ("parallel", ctypes.c_void_p),
    ]


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of a step, the same for all layers.

    Sequence s has the batch's tokens [starts[s], starts[s + 1]) and the int64 block table `tables[s]`, which
    is contiguous.
    """

    starts: np.ndarray
    tables: Sequence[torch.Tensor]
    addresses: np.ndarray

    @classmethod
    def of(cls, starts: Sequence[int], tables: Sequence[torch.Tensor]) -> Sequences:
        addresses = [table.data_ptr() for table in tables]
        return cls(np.array(starts, np.int64), tables, np.array(addresses, np.uint64))


def takes(dtype: torch.dtype) -> bool:
    """Whether there is a kernel for numbers of this type."""
    return dtype in _BYTES and kernel_library() is not None


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_size: int,
    sequences: Sequences,
    bounds: np.ndarray,
    out: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
    instructions: int = WIDEST,
) -> None:
    """Writes `out` [T, heads, value dim] of query [heads, T, dim] over a layer's cache.

    `keys` [kv_heads, slots, dim] and `values` [kv_heads, slots, value dim] are contiguous in slots. Token t
    attends to the keys [bounds[t, 0], bounds[t, 1]) of its sequence (int32 [T, 2]). A score s becomes
    softcap * tanh(s / softcap) where that is not 0. `bias`, float32 and without a softcap, is added to the
    scores: [heads, distances], where column d is for the key d positions before the token's last key and the
    last column for all greater distances; or [heads, tokens, keys] by index in the sequence. Runs on torch's
    threads, without the interpreter's lock.
    """
    library = kernel_library()
    assert library is not None
    if query.stride(-1) != 1:
        query = query.contiguous()
    assert bias is None or (bias.dtype == torch.float32 and bias.stride(-1) == 1)
    heads, kv_heads = query.shape[0], keys.shape[0]
    call = _Call(
        query=query.data_ptr(),
        query_head=query.stride(0),
        query_token=query.stride(1),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        key_head=keys.stride(0),
        value_head=values.stride(0),
        out=out.data_ptr(),
        starts=sequences.starts.ctypes.data,
        tables=sequences.addresses.ctypes.data,
        bounds=bounds.ctypes.data,
        sequences=len(sequences.tables),
        kv_heads=kv_heads,
        groups=heads // kv_heads,
        dim=keys.shape[2],
        value_dim=values.shape[2],
        block_size=block_size,
        bytes=_BYTES[query.dtype],
        instructions=instructions,
        threads=torch.get_num_threads(),
        scale=scale,
        softcap=softcap,
        bias=None if bias is None else bias.data_ptr(),
        bias_head=0 if bias is None else bias.stride(0),
        bias_token=0 if bias is None or bias.dim() == 2 else bias.stride(1),
        distances=0 if bias is None else bias.shape[1],
        parallel=parallel_address(),
    )
    raise_for(library.triptych_attention(ctypes.byref(call)), "attention")


@functools.cache
def parallel_address() -> int | None:
    """The address of GOMP_parallel in the OpenMP that torch has loaded; None where it is not found.

    A second OpenMP, or threads of our own, would fight torch's for the cores: its threads spin between calls.
    """
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    paths = {
        line.split(maxsplit=5)[-1] for line in maps.splitlines() if "libgomp" in line or "libiomp" in line
    }
    for path in sorted(paths):
        try:
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None

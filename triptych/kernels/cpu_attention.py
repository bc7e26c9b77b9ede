"""Attention over a paged cache on a CPU in one call for all sequences of a step; heads rotated and cached."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from triptych.kernels.library import kernel_library

#: Instruction sets: 0 what every CPU has, 1 AVX2, 2 AVX-512, 3 with bfloat16, 4 with AMX. The CPU's own limit
#: holds, too.
WIDEST = 4
_BYTES = {torch.float32: 4, torch.bfloat16: 2}


def raise_for(code: int, kernel: str) -> None:
    """Raises what a kernel's code means: 0 nothing, 1 MemoryError, any other ValueError."""
    if code == 1:
        raise MemoryError(f"no memory for the {kernel} kernel")
    if code:
        raise ValueError(f"sizes that the {kernel} kernel does not take")


class _Call(ctypes.Structure):
    """AttentionCall of attention.h."""

    _fields_ = [
        ("query", ctypes.c_void_p),
        ("query_head", ctypes.c_int64),
        ("query_token", ctypes.c_int64),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("key_block", "key_head", "value_block", "value_head")),
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
        ("sinks", ctypes.c_void_p),
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
    sequences: Sequences,
    bounds: np.ndarray,
    out: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    instructions: int = WIDEST,
) -> None:
    """Writes `out` [T, heads, value dim] of query [heads, T, dim] over a layer's cache.

    `keys` [blocks, block size, kv_heads, dim] and `values`, with the value dim, have the rows of one block
    and head side by side. Token t attends to the keys [bounds[t, 0], bounds[t, 1]) of its sequence (int32
    [T, 2]). A score s becomes softcap * tanh(s / softcap) where that is not 0. `bias`, float32 and without a
    softcap, is added to the scores: [heads, distances], where column d is for the key d positions before the
    token's last key and the last column for all greater distances; or [heads, tokens, keys] by index in the
    sequence. `sinks` [heads], float32, are the scores of one more key each, whose value is zero. Runs on
    torch's threads, without the interpreter's lock.
    """
    library = kernel_library()
    assert library is not None
    if query.stride(-1) != 1:
        query = query.contiguous()
    assert bias is None or (bias.dtype == torch.float32 and bias.stride(-1) == 1)
    heads, (_, block_size, kv_heads, dim), value_dim = query.shape[0], keys.shape, values.shape[-1]
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous() and len(sinks) == heads)
    assert keys.stride()[1::2] == (dim, 1) and values.stride()[1::2] == (value_dim, 1)
    call = _Call(
        query=query.data_ptr(),
        query_head=query.stride(0),
        query_token=query.stride(1),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        key_block=keys.stride(0),
        key_head=keys.stride(2),
        value_block=values.stride(0),
        value_head=values.stride(2),
        out=out.data_ptr(),
        starts=sequences.starts.ctypes.data,
        tables=sequences.addresses.ctypes.data,
        bounds=bounds.ctypes.data,
        sequences=len(sequences.tables),
        kv_heads=kv_heads,
        groups=heads // kv_heads,
        dim=dim,
        value_dim=value_dim,
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
        sinks=None if sinks is None else sinks.data_ptr(),
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


class _Rotary(ctypes.Structure):
    """RotaryCall of heads.h."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("x_token", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "norm")),
        ("tokens", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("heads", "dim", "bytes", "angle_bytes")),
        ("epsilon", ctypes.c_float),
        ("instructions", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("parallel", ctypes.c_void_p),
    ]


class _Rows(ctypes.Structure):
    """CachedRows of heads.h."""

    _fields_ = [
        ("source", ctypes.c_void_p),
        ("token", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("to", ctypes.c_void_p),
        ("to_head", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
    ]


class _Write(ctypes.Structure):
    """WriteCall of heads.h."""

    _fields_ = [
        ("keys", _Rows),
        ("values", _Rows),
        ("at", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("slots", ctypes.c_int64),
        ("heads", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("parallel", ctypes.c_void_p),
    ]


def rotates(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: torch.Tensor | None = None) -> bool:
    """Whether `rotate` takes these."""
    if x.device.type != "cpu" or not takes(x.dtype) or x.requires_grad:
        return False
    alike = cos.dtype == sin.dtype and (norm is None or norm.dtype == x.dtype)
    known = cos.dtype in (x.dtype, torch.float32)
    return alike and known and cos.is_contiguous() and sin.is_contiguous()


def rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: torch.Tensor | None = None,
    epsilon: float = 0.0,
    *,
    instructions: int = WIDEST,
) -> None:
    """Rotates x [T, heads, dim] in place by cos and sin [T, 1, dim], contiguous, of its dtype or float32.

    x * cos + roll(x, dim / 2) * sin, of x normalised by `norm` [heads, dim] where that is given (RMSNorm).
    float32 and bfloat16; a token's heads lie side by side.
    """
    library = kernel_library()
    assert library is not None
    tokens, heads, dim = x.shape
    call = _Rotary(
        x.data_ptr(),
        x.stride(0),
        cos.data_ptr(),
        sin.data_ptr(),
        None if norm is None else norm.data_ptr(),
        tokens,
        heads,
        dim,
        x.element_size(),
        cos.element_size(),
        epsilon,
        instructions,
        torch.get_num_threads(),
        parallel_address(),
    )
    raise_for(library.triptych_rotate(ctypes.byref(call)), "rotary")


def fits(rows: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether `write_cache` takes this source [T, kv_heads, dim] for these rows."""
    same = rows.dtype == source.dtype and source.stride(2) == 1
    return same and source.shape[1:] == (rows.shape[0], rows.shape[2])


def write_cache(
    key_rows: torch.Tensor,
    value_rows: torch.Tensor,
    slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Copies key and value [T, kv_heads, dim] to `slots` [T], int64, of rows [kv_heads, slots, dim].

    Dimensions are contiguous, slots too. IndexError for a slot that is not there; then nothing is copied.
    """
    library = kernel_library()
    assert library is not None
    call = _Write(
        _rows(key, key_rows),
        _rows(value, value_rows),
        slots.data_ptr(),
        len(slots),
        key_rows.shape[1],
        key_rows.shape[0],
        torch.get_num_threads(),
        parallel_address(),
    )
    if library.triptych_write_cache(ctypes.byref(call)):
        raise IndexError(f"a slot is outside of the cache's {key_rows.shape[1]}")


def _rows(source: torch.Tensor, rows: torch.Tensor) -> _Rows:
    size = source.element_size()
    return _Rows(
        source.data_ptr(),
        source.stride(0) * size,
        source.stride(1) * size,
        rows.data_ptr(),
        rows.stride(0) * size,
        rows.shape[2] * size,
    )

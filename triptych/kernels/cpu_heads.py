"""Heads of queries, keys and values on a CPU: rotated in place, and written into a paged cache."""

from __future__ import annotations

import ctypes

import torch

from triptych.kernels.cpu_attention import WIDEST as WIDEST
from triptych.kernels.cpu_attention import parallel_address
from triptych.kernels.library import kernel_library, raise_for


class _Rotary(ctypes.Structure):
    """RotaryCall of heads.h."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("x_token", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "norm")),
        ("tokens", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("heads", "dim", "bytes")),
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


def rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: torch.Tensor | None = None,
    epsilon: float = 0.0,
    *,
    instructions: int = WIDEST,
) -> None:
    """Rotates x [T, heads, dim] in place by cos and sin [T, 1, dim], contiguous and of its dtype.

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

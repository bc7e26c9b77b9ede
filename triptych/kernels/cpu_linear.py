"""Linear layers over few rows of bfloat16 on a CPU, with the norm before and the sum or SiLU after them."""

from __future__ import annotations

import ctypes

import torch

from triptych.kernels.cpu_attention import WIDEST as WIDEST
from triptych.kernels.cpu_attention import parallel_address, raise_for
from triptych.kernels.library import kernel_library

#: Outputs of one block of a weight that the kernel takes: oneDNN's with AMX, and without.
BLOCKS = (32, 64)


class _Call(ctypes.Structure):
    """LinearCall of linear.h."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("x_row", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_row", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("bias", "norm", "residual")),
        ("residual_row", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("rows", "ins", "outs", "block", "gated")),
        ("epsilon", ctypes.c_float),
        ("instructions", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("parallel", ctypes.c_void_p),
    ]


def multiply(
    x: torch.Tensor,
    weight: int,
    outs: int,
    block: int,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    epsilon: float = 0.0,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    instructions: int = WIDEST,
) -> torch.Tensor:
    """[rows, outs] of x [rows, ins], all bfloat16, with the address of a `weight` [outs, ins].

    The weight is in blocks of `block` outputs. With `norm` [ins] x is normalised before (RMSNorm).
    `residual` [rows, outs] is added. `gated`: the first half of the outputs, by SiLU, times the second half
    is the result. Runs on torch's threads, without the interpreter's lock.
    """
    library = kernel_library()
    assert library is not None
    rows, ins = x.shape
    out = x.new_empty(rows, outs // 2 if gated else outs)
    call = _Call(
        x.data_ptr(),
        x.stride(0),
        weight,
        out.data_ptr(),
        out.stride(0),
        None if bias is None else bias.data_ptr(),
        None if norm is None else norm.data_ptr(),
        None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        rows,
        ins,
        outs,
        block,
        gated,
        epsilon,
        instructions,
        torch.get_num_threads(),
        parallel_address(),
    )
    raise_for(library.triptych_linear(ctypes.byref(call)), "linear")
    return out

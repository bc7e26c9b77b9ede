"""Linear layers on a CPU, over few rows or in AMX tiles, with the norm before and what stands after them."""

from __future__ import annotations

import ctypes

import torch

from triptych.kernels.cpu_attention import WIDEST as WIDEST
from triptych.kernels.cpu_attention import parallel_address, raise_for
from triptych.kernels.library import kernel_library

#: Outputs of one block of a weight that the kernel takes: oneDNN's with AMX, and without.
BLOCKS = (32, 64)
#: Of a weight as torch keeps it, [outs, ins]; of such a weight it takes a multiple of PLAIN_OUTS outputs.
PLAIN, PLAIN_OUTS = 1, 32


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
        *((name, ctypes.c_int32) for name in ("rows", "ins", "outs", "block", "bytes", "gated")),
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
    """[rows, outs] of x [rows, ins], all bfloat16, with the address of a `weight` [outs, ins]. Or all
    float32, by a PLAIN weight and with a bias at most.

    The weight is in blocks of `block` outputs, or PLAIN. With `norm` [ins] x is normalised before (RMSNorm).
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
        x.element_size(),
        gated,
        epsilon,
        instructions,
        torch.get_num_threads(),
        parallel_address(),
    )
    raise_for(library.triptych_linear(ctypes.byref(call)), "linear")
    return out


class _RowsCall(ctypes.Structure):
    """RowsCall of linear.h."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("x_row", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_row", ctypes.c_int64),
        ("norm", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
        ("instructions", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("parallel", ctypes.c_void_p),
    ]


def normalise(
    x: torch.Tensor, norm: torch.Tensor, epsilon: float, *, instructions: int = WIDEST
) -> torch.Tensor:
    """RMSNorm of x [rows, width] of bfloat16, as `multiply` has it before a product."""
    return _of_rows(x, x.shape[1], norm, epsilon, instructions)


def gate(x: torch.Tensor, *, instructions: int = WIDEST) -> torch.Tensor:
    """[rows, width] of x [rows, 2 width] of bfloat16: SiLU of the first half times the second."""
    return _of_rows(x, x.shape[1] // 2, None, 0.0, instructions)


def _of_rows(
    x: torch.Tensor, width: int, norm: torch.Tensor | None, epsilon: float, instructions: int
) -> torch.Tensor:
    library = kernel_library()
    assert library is not None
    out = x.new_empty(len(x), width)
    call = _RowsCall(
        x.data_ptr(),
        x.stride(0),
        out.data_ptr(),
        out.stride(0),
        None if norm is None else norm.data_ptr(),
        len(x),
        width,
        epsilon,
        instructions,
        torch.get_num_threads(),
        parallel_address(),
    )
    raise_for(library.triptych_rows(ctypes.byref(call)), "linear")
    return out


def instructions_here() -> int:
    """The widest set of instructions, up to WIDEST, that this CPU has and the system lets us use."""
    library = kernel_library()
    return 0 if library is None else int(library.triptych_instructions())

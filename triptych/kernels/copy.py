"""A copy of floating-point numbers that is hashed and checked in the same pass over memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from triptych.kernels.library import kernel_library

#: Bytes and bits of the exponent of a number, all of which are set where it is infinite or NaN.
_EXPONENTS = {"bfloat16": (2, 0x7F80), "float16": (2, 0x7C00), "float32": (4, 0x7F800000)}
#: Bytes that stay in a core's cache from the copy to the next reader of them.
_PIECE_BYTES = 512 << 10
#: A larger copy is written past the caches, which it does not fit in.
_STREAMED_BYTES = 16 << 20

#: Copies a piece from the first to the second array, and says whether its numbers are finite.
CopyPiece = Callable[[np.ndarray, np.ndarray], bool]


def copy_checked(
    source: np.ndarray, target: np.ndarray, dtype: str, update: Callable[[memoryview], object]
) -> bool:
    """Copies numbers of `dtype`, calls `update` with every piece, and says whether all are finite.

    Both are contiguous, uint8, and of one length. Runs without the interpreter's lock where `update` does.
    """
    if source.dtype != np.uint8 or target.dtype != np.uint8 or source.shape != target.shape:
        raise ValueError(f"{source.dtype} {source.shape} cannot be copied into {target.dtype} {target.shape}")
    library, finite = kernel_library(), True
    stream = len(source) > _STREAMED_BYTES
    copy = _by_numpy(dtype) if library is None else _by_kernel(library, dtype, stream=stream)
    for start in range(0, len(source), _PIECE_BYTES):
        piece = source[start : start + _PIECE_BYTES]
        finite &= copy(piece, target[start : start + _PIECE_BYTES])
        update(piece.data)
    return finite


def _by_kernel(library: ctypes.CDLL, dtype: str, *, stream: bool) -> CopyPiece:
    size, exponent = _EXPONENTS[dtype]

    def copy(source: np.ndarray, target: np.ndarray) -> bool:
        pointers = ctypes.c_void_p(source.ctypes.data), ctypes.c_void_p(target.ctypes.data)
        numbers = (
            ctypes.c_size_t(len(source)),
            ctypes.c_int(size),
            ctypes.c_uint32(exponent),
            ctypes.c_int(stream),
        )
        code: int = library.triptych_copy_finite(*pointers, *numbers)
        if code > 1:
            raise ValueError(f"{len(source)} bytes are no whole numbers of {dtype}")
        return code == 0

    return copy


def _by_numpy(dtype: str) -> CopyPiece:
    size, exponent = _EXPONENTS[dtype]
    sign = 1 << (8 * size - 1)

    def copy(source: np.ndarray, target: np.ndarray) -> bool:
        np.copyto(target, source)
        # As integers, positive numbers without a fraction's end come before infinity; negative ones likewise.
        signed, unsigned = source.view(f"i{size}"), source.view(f"u{size}")
        return bool(signed.max() < exponent and unsigned.max() < sign | exponent)

    return copy

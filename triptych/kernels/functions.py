"""The kernels as functions: pictures resized into a tower's order, and copies that are hashed and checked."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np

from triptych.kernels.library import kernel_library

CHANNELS = 3
#: Pillow's numbers of the filters that the kernel has: Lanczos, bilinear, bicubic, box, Hamming.
FILTERS = frozenset((1, 2, 3, 4, 5))


@dataclass(frozen=True, slots=True)
class PictureKernel:
    """Calls into the library, without the interpreter's lock.

    `instructions` limits the instruction set: 0 to what every CPU has, 1 to AVX2, 2 to AVX-512.
    """

    library: ctypes.CDLL
    instructions: int = 2

    @classmethod
    @functools.cache
    def load(cls) -> Self | None:
        library = kernel_library()
        return None if library is None else cls(library)

    def levels(
        self, pixels: np.ndarray, size: tuple[int, int], resample: int, patch: tuple[int, int], merge: int = 1
    ) -> np.ndarray:
        """uint8 [patches, 3, patch height, patch width] of uint8 [height, width, 3] resized to `size`.

        `size` and `patch` are widths and heights; merge x merge neighbouring patches follow one another.
        """
        pixels = np.ascontiguousarray(pixels)
        height, width, channels = pixels.shape
        if pixels.dtype != np.uint8 or channels != CHANNELS:
            raise ValueError(f"pixels are {pixels.dtype} of {channels} channels: uint8 of 3 are needed")
        count = (size[0] // patch[0]) * (size[1] // patch[1])
        levels = np.empty((count, CHANNELS, patch[1], patch[0]), np.uint8)
        numbers = (width, height, *size, resample, *patch, merge, self.instructions)
        _check(
            self.library.triptych_picture_levels(
                _pointer(pixels), *map(ctypes.c_int, numbers), _pointer(levels)
            )
        )
        return levels

    def look_up(self, levels: np.ndarray, table: np.ndarray, copies: int = 1) -> np.ndarray:
        """[items, channels, copies, side] of uint8 levels [items, channels, side] by `table` [channels, 256].

        The table's items have two or four bytes.
        """
        levels, table = np.ascontiguousarray(levels), np.ascontiguousarray(table)
        items, channels, side = levels.shape
        if levels.dtype != np.uint8 or table.shape != (channels, 256):
            raise ValueError(f"{levels.dtype} levels and a table {table.shape} do not fit")
        values = np.empty((items, channels, copies, side), table.dtype)
        sizes = map(ctypes.c_size_t, (items, channels, side, copies))
        _check(
            self.library.triptych_look_up(
                _pointer(levels), *sizes, ctypes.c_int(table.itemsize), _pointer(table), _pointer(values)
            )
        )
        return values


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _check(code: int) -> None:
    if code == 1:
        raise MemoryError("no memory to resize a picture")
    if code:
        raise ValueError("sizes or settings that the picture kernel does not take")


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
    """Copies numbers of `dtype`, calls `update` with every piece, and says whether all are finite; int8 are.

    Both are contiguous, uint8, and of one length. Runs without the interpreter's lock where `update` does.
    """
    if source.dtype != np.uint8 or target.dtype != np.uint8 or source.shape != target.shape:
        raise ValueError(f"{source.dtype} {source.shape} cannot be copied into {target.dtype} {target.shape}")
    library, finite = kernel_library(), True
    stream = len(source) > _STREAMED_BYTES
    copy: CopyPiece = _integers
    if dtype in _EXPONENTS:
        copy = _by_numpy(dtype) if library is None else _by_kernel(library, dtype, stream=stream)
    for start in range(0, len(source), _PIECE_BYTES):
        piece = source[start : start + _PIECE_BYTES]
        finite &= copy(piece, target[start : start + _PIECE_BYTES])
        update(piece.data)
    return finite


def _integers(source: np.ndarray, target: np.ndarray) -> bool:
    np.copyto(target, source)
    return True


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

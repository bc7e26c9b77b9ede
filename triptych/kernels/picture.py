"""The picture kernel: 8-bit RGB resized as Pillow does and put in a tower's order, and values by table."""

from __future__ import annotations

import ctypes
import functools
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

"""The picture kernel gives Pillow's bits, with every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from triptych.kernels.build import compiler
from triptych.kernels.picture import FILTERS, PictureKernel

needs_kernel = pytest.mark.skipif(PictureKernel.load() is None, reason="no C++ compiler")


def noise(width: int, height: int) -> np.ndarray:
    return np.random.default_rng(width * 7919 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)


def ordered(pixels: np.ndarray, patch: int, merge: int) -> np.ndarray:
    height, width, _ = pixels.shape
    tiled = (height // (patch * merge), merge, patch, width // (patch * merge), merge, patch, 3)
    return pixels.reshape(tiled).transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, patch, patch)


def kernel(instructions: int = 2) -> PictureKernel:
    loaded = PictureKernel.load()
    assert loaded is not None
    return PictureKernel(loaded.library, instructions)


def test_the_kernel_is_there_where_a_compiler_is() -> None:
    assert PictureKernel.load() is not None or compiler() is None


#: Sizes before and after: only across, only down, both ways, the vertical pass first, to and from one pixel.
RESIZES = [
    *(((1, 1), (1, 1)), ((1, 1), (64, 48)), ((640, 480), (1, 1)), ((97, 61), (97, 61))),
    *(((97, 61), (64, 61)), ((97, 61), (97, 96)), ((97, 61), (160, 128)), ((333, 77), (32, 40))),
    *(((420, 1400), (384, 288)), ((40, 900), (64, 32)), ((1, 150), (32, 64)), ((150, 1), (64, 32))),
    *(((17, 16), (16, 17)), ((1000, 33), (70, 31)), ((33, 1000), (34, 999)), ((250, 250), (249, 251))),
]


@needs_kernel
@pytest.mark.parametrize("instructions", [0, 1, 2])
@pytest.mark.parametrize("resample", sorted(FILTERS))
@pytest.mark.parametrize(("before", "after"), RESIZES)
def test_a_resized_picture_is_pillows(
    before: tuple[int, int], after: tuple[int, int], resample: int, instructions: int
) -> None:
    pixels = noise(*before)
    expected = np.asarray(Image.fromarray(pixels).resize(after, resample)).transpose(2, 0, 1)
    assert np.array_equal(kernel(instructions).levels(pixels, after, resample, after)[0], expected)


@needs_kernel
@pytest.mark.parametrize(("patch", "merge"), [(14, 2), (16, 2), (16, 1), (5, 3), (1, 1)])
def test_patches_are_in_the_towers_order(patch: int, merge: int) -> None:
    size = (3 * patch * merge, 4 * patch * merge)
    resized = np.asarray(Image.fromarray(noise(50, 70)).resize(size, 3))
    levels = kernel().levels(noise(50, 70), size, 3, (patch, patch), merge)
    assert np.array_equal(levels, ordered(resized, patch, merge))


@needs_kernel
@pytest.mark.parametrize("dtype", [np.float32, np.int16])
def test_values_are_those_of_the_table(dtype: type) -> None:
    levels = np.random.default_rng(0).integers(0, 256, (5, 3, 49), dtype=np.uint8)
    table = np.random.default_rng(1).integers(-9999, 9999, (3, 256)).astype(dtype)
    values = kernel().look_up(levels, table, copies=2)
    assert values.shape == (5, 3, 2, 49) and values.dtype == dtype
    for channel in range(3):
        for copy in range(2):
            assert np.array_equal(values[:, channel, copy], table[channel][levels[:, channel]])


@needs_kernel
def test_what_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="sizes"):
        kernel().levels(noise(8, 8), (30, 32), 3, (16, 16))
    with pytest.raises(ValueError, match="sizes"):
        kernel().levels(noise(8, 8), (32, 32), 0, (16, 16))
    with pytest.raises(ValueError, match="uint8 of 3"):
        kernel().levels(np.zeros((8, 8, 4), np.uint8), (32, 32), 3, (16, 16))
    with pytest.raises(ValueError, match="do not fit"):
        kernel().look_up(np.zeros((1, 3, 8), np.uint8), np.zeros((1, 256), np.float32))
    with pytest.raises(ValueError, match="settings"):
        kernel().look_up(np.zeros((1, 3, 8), np.uint8), np.zeros((3, 256)))

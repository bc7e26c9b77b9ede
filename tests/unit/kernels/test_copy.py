"""The kernels for copies and pictures."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import xxhash
from PIL import Image

from triptych.kernels import functions
from triptych.kernels.functions import FILTERS, PictureKernel
from triptych.kernels.library import compiler, kernel_library

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture(params=["kernel", "streaming kernel", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(functions, "kernel_library", lambda: None)
    elif kernel_library() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(functions, "_STREAMED_BYTES", 0 if "streaming" in request.param else 1 << 30)


def numbers(dtype: str, count: int) -> np.ndarray:
    """All finite, among them the largest of both signs, the smallest, and zeros."""
    limits = torch.finfo(DTYPES[dtype])
    values = torch.randn(count).to(DTYPES[dtype])
    for index, value in enumerate((limits.max, limits.min, limits.tiny, 0.0, -0.0)):
        values[index * 7 % count] = value
    return values.view(torch.uint8).numpy()


def copied(source: np.ndarray, dtype: str, offset: int = 0) -> tuple[np.ndarray, bool, bytes]:
    """The copy, `offset` bytes behind an aligned place, whether it is finite, and the checksum."""
    memory, state = np.full(len(source) + 192, 7, np.uint8), xxhash.xxh3_128()
    start = 64 - memory.ctypes.data % 64 + offset
    before, target, after = np.split(memory, [start, start + len(source)])
    finite = functions.copy_checked(source, target, dtype, state.update)
    assert (before == 7).all() and (after == 7).all()
    return target, finite, state.digest()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 31, 64, 999, (1 << 19) + 5])
def test_a_copy_has_the_bytes_and_their_checksum(dtype: str, count: int) -> None:
    source = numbers(dtype, count)
    for offset in (0, 2):
        target, finite, checksum = copied(source, dtype, offset)
        assert np.array_equal(target, source) and finite
        assert checksum == xxhash.xxh3_128_digest(source.data)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_seen_wherever_it_is(dtype: str, value: float) -> None:
    for count in (1, 75, 300_000):
        for index in {0, count // 2, count - 1}:
            values = torch.from_numpy(numbers(dtype, count).copy()).view(DTYPES[dtype])
            values[index] = value
            source = values.view(torch.uint8).numpy()
            target, finite, _ = copied(source, dtype)
            assert not finite and np.array_equal(target, source)


@pytest.mark.usefixtures("way")
def test_arrays_that_do_not_fit_are_refused() -> None:
    source = np.zeros(8, np.uint8)
    with pytest.raises(ValueError, match="cannot be copied"):
        functions.copy_checked(source, np.zeros(4, np.uint8), "float32", len)
    with pytest.raises(ValueError, match="cannot be copied"):
        functions.copy_checked(source, np.zeros(8, np.float32), "float32", len)


def test_integers_are_finite_whatever_their_bytes_are() -> None:
    source = np.full(1001, 255, np.uint8)
    target, finite, _ = copied(source, "int8")
    assert finite and np.array_equal(target, source)


def test_bytes_that_are_no_whole_numbers_are_refused() -> None:
    with pytest.raises(ValueError):
        functions.copy_checked(np.zeros(3, np.uint8), np.zeros(3, np.uint8), "bfloat16", len)


needs_kernel = pytest.mark.skipif(PictureKernel.load() is None, reason="no C++ compiler")


def noise(width: int, height: int) -> np.ndarray:
    return np.random.default_rng(width * 7919 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)


def ordered(pixels: np.ndarray, patch: int, merge: int) -> np.ndarray:
    height, width, _ = pixels.shape
    tiled = (height // (patch * merge), merge, patch, width // (patch * merge), merge, patch, 3)
    return pixels.reshape(tiled).transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, patch, patch)


def kernel(instructions: int = 2) -> PictureKernel:
    loaded = PictureKernel.load()
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
def test_a_resized_picture_is_pillows(before, after, resample, instructions):
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
        for frame in range(2):
            assert np.array_equal(values[:, channel, frame], table[channel][levels[:, channel]])


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

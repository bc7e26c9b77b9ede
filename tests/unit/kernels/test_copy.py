"""A checked copy: its bytes, what it is hashed from, and every number that is not finite."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import xxhash

from triptych.kernels import copy
from triptych.kernels.library import kernel_library

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture(params=["kernel", "streaming kernel", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(copy, "kernel_library", lambda: None)
    elif kernel_library() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(copy, "_STREAMED_BYTES", 0 if "streaming" in request.param else 1 << 30)


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
    finite = copy.copy_checked(source, target, dtype, state.update)
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
        copy.copy_checked(source, np.zeros(4, np.uint8), "float32", len)
    with pytest.raises(ValueError, match="cannot be copied"):
        copy.copy_checked(source, np.zeros(8, np.float32), "float32", len)


def test_bytes_that_are_no_whole_numbers_are_refused() -> None:
    with pytest.raises(ValueError):
        copy.copy_checked(np.zeros(3, np.uint8), np.zeros(3, np.uint8), "bfloat16", len)

"""One memory for all host copies: handed out in pieces, to the last byte, locked once."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triptych.ec_connector.connectors import host_buffers
from triptych.ec_connector.connectors.host_buffers import PinnedMemory, PinnedPool


@given(seed=st.integers(0, 1 << 30), size=st.integers(0, 60))
def test_parts_never_overlap_and_all_free_bytes_can_be_allocated(seed: int, size: int) -> None:
    rng = random.Random(seed)
    memory = PinnedMemory(size, lock=False)
    pool, taken = PinnedPool(memory), []
    for _ in range(40):
        if taken and rng.random() < 0.45:
            pool.free(taken.pop(rng.randrange(len(taken))))
        else:
            want = rng.randint(0, pool.num_free)
            taken.append(pool.allocate(want))
            assert sum(piece.numel() for piece in taken[-1]) == want
        memory.bytes.zero_()
        for piece in (piece for part in taken for piece in part):
            piece += 1
        assert memory.bytes.max() <= 1 if size else True
        assert int(memory.bytes.sum()) == size - pool.num_free
    for part in taken:
        pool.free(part)
    assert [piece.numel() for piece in pool.allocate(size)] == ([size] if size else [])


def test_a_part_is_in_one_piece_where_one_is_long_enough_and_the_shortest_such() -> None:
    pool = PinnedPool(PinnedMemory(10, lock=False))
    first, second, third, _ = (pool.allocate(nbytes) for nbytes in (4, 1, 2, 3))
    pool.free(first)
    pool.free(third)
    [piece] = pool.allocate(2)
    assert piece.data_ptr() == third[0].data_ptr()
    assert len(pool.allocate(4)) == 1


def test_more_than_is_free_is_an_error_and_takes_nothing() -> None:
    pool = PinnedPool(PinnedMemory(10, lock=False))
    pool.allocate(4)
    with pytest.raises(MemoryError, match="7 bytes .* 6 are free"):
        pool.allocate(7)
    assert pool.num_free == 6


class Driver:
    """CUDA's calls, noted."""

    def __init__(self, status: int = 0) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.status = status

    def cudaHostRegister(self, *words: int) -> int:
        self.calls.append(("lock", words))
        return self.status

    def cudaHostUnregister(self, *words: int) -> int:
        self.calls.append(("unlock", words))
        return 0


def fake_driver(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> Driver:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    return driver


def test_exactly_the_bytes_asked_for_are_locked_once_and_unlocked_once(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    driver = fake_driver(monkeypatch, Driver())
    memory = PinnedMemory(12345, lock=True)
    pool = PinnedPool(memory)
    for _ in range(5):
        pool.free(pool.allocate(1000))
    pool.close()
    pool.close()
    at = memory.bytes.data_ptr()
    assert driver.calls == [("lock", (at, 12345, 1)), ("unlock", (at,))]


def test_memory_that_is_not_closed_is_unlocked_before_it_is_freed(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    driver = fake_driver(monkeypatch, Driver())
    at = PinnedMemory(4096, lock=True).bytes.data_ptr()
    gc.collect()
    assert driver.calls == [("lock", (at, 4096, 1)), ("unlock", (at,))]


def test_memory_that_cannot_be_locked_is_an_error_at_start(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    fake_driver(monkeypatch, Driver(status=2))
    with pytest.raises(RuntimeError, match="CUDA error 2.*: lower --encoder-cache-memory"):
        host_buffers.PinnedMemory(4096, lock=True)

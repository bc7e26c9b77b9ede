"""Host memory of a connector: locked, used again, and served from."""

from __future__ import annotations

import gc
import mmap
import random
from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.fakes.fake_cuda import FakeCuda, fake_cuda
from triptych.base.cpu.threads import in_short_lived_thread
from triptych.base.machine.device import Device
from triptych.ec_connector.connectors.host_buffers import HostBuffer, PinnedMemory, PinnedPool, ReusedMemory

SIZE = 1 << 16


def address(memory: ReusedMemory, nbytes: int = SIZE, kept: int = 1 << 20) -> int:
    return memory.empty(nbytes, kept=kept).data_ptr()


def test_memory_that_nothing_refers_to_is_given_out_again() -> None:
    memory = ReusedMemory()
    first = address(memory)
    assert address(memory) == address(memory, SIZE - 100) == address(memory, SIZE // 2) == first


@pytest.mark.parametrize(
    "view",
    [
        lambda tensor: tensor,
        lambda tensor: tensor.view(torch.bfloat16).view(-1, 16)[3:, 2:],
        lambda tensor: HostBuffer([tensor]).views()[0][5:],
        lambda tensor: tensor.numpy(),
    ],
)
def test_memory_is_not_given_out_while_a_view_of_it_lives(view: Callable[[torch.Tensor], object]) -> None:
    memory = ReusedMemory()
    tensor = memory.empty(SIZE, kept=1 << 20)
    first = tensor.data_ptr()
    part = view(tensor)
    del tensor
    assert address(memory) != first
    del part
    both = [memory.empty(SIZE, kept=1 << 20) for _ in range(2)]
    assert first in {tensor.data_ptr() for tensor in both}


@pytest.mark.parametrize("nbytes", [SIZE + 1, SIZE // 2 - 1])
def test_memory_of_another_size_stays_for_the_next(nbytes: int) -> None:
    memory = ReusedMemory()
    first = address(memory)
    other = memory.empty(nbytes, kept=1 << 20)
    assert other.data_ptr() != first
    assert address(memory) == first


def test_no_more_is_kept_than_the_limit_leaves() -> None:
    memory = ReusedMemory()
    tensors = [memory.empty(SIZE, kept=0) for _ in range(5)]
    tensors.clear()
    held = memory.empty(4 * SIZE, kept=2 * SIZE)
    assert sum(map(len, memory._free)) == 2 * SIZE
    del held
    memory.empty(0, kept=0)
    assert not memory._free


@given(seed=st.integers(0, 1 << 30), size=st.integers(0, 60))
def test_parts_never_overlap_and_all_free_bytes_can_be_allocated(seed: int, size: int) -> None:
    rng = random.Random(seed)
    memory = PinnedMemory(size)
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
    pool = PinnedPool(PinnedMemory(10))
    first, second, third, _ = (pool.allocate(nbytes) for nbytes in (4, 1, 2, 3))
    pool.free(first)
    pool.free(third)
    [piece] = pool.allocate(2)
    assert piece.data_ptr() == third[0].data_ptr()
    assert len(pool.allocate(4)) == 1


def test_more_than_is_free_is_an_error_and_takes_nothing() -> None:
    pool = PinnedPool(PinnedMemory(10))
    pool.allocate(4)
    with pytest.raises(MemoryError, match="7 bytes .* 6 are free"):
        pool.allocate(7)
    assert pool.num_free == 6


CUDA = Device.of(torch.device("cuda", 1))


def locked(cuda: FakeCuda) -> list[tuple[str, object]]:
    return [call for call in cuda.calls if call[0] in ("cudaHostRegister", "cudaHostUnregister")]


def test_whole_pages_are_locked_once_and_unlocked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = fake_cuda(monkeypatch)
    memory = PinnedMemory(12345, CUDA)
    pool = PinnedPool(memory)
    for _ in range(5):
        pool.free(pool.allocate(1000))
    pool.close()
    pool.close()
    at, page = memory.bytes.data_ptr(), mmap.PAGESIZE
    assert locked(cuda) == [
        ("cudaHostRegister", (at, -(-12345 // page) * page, 1, "cuda:1")),
        ("cudaHostUnregister", (at, "cuda:1")),
    ]


def test_no_two_memories_share_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """cudaHostRegister refuses a page that is locked already."""
    cuda = fake_cuda(monkeypatch)
    memories = [PinnedMemory(nbytes, CUDA) for nbytes in (100, 1, 5000, 64, 4096, 4097)]
    ranges = [
        range(address, address + nbytes) for address, nbytes, *_ in (words for _, words in locked(cuda))
    ]  # type: ignore[misc]
    assert all(address.start % mmap.PAGESIZE == 0 for address in ranges)
    assert all(one.stop <= other.start or other.stop <= one.start for one, other in combinations(ranges, 2))
    assert [memory.bytes.numel() for memory in memories] == [100, 1, 5000, 64, 4096, 4097]


def test_pages_are_locked_with_the_device_selected_in_that_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the driver opens a context on the first GPU."""
    cuda = fake_cuda(monkeypatch)
    memory = in_short_lived_thread(PinnedMemory, 4096, CUDA)
    assert locked(cuda)[0][1] == (memory.bytes.data_ptr(), 4096, 1, "cuda:1")
    assert cuda.selected.keys() == {"short-lived_0"}


def test_memory_that_is_not_closed_is_unlocked_before_it_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = fake_cuda(monkeypatch)
    at = PinnedMemory(4096, CUDA).bytes.data_ptr()
    gc.collect()
    assert locked(cuda)[1:] == [("cudaHostUnregister", (at, "cuda:1"))]


def test_memory_that_cannot_be_locked_is_an_error_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = fake_cuda(monkeypatch)
    monkeypatch.setattr(cuda, "cudaHostRegister", lambda *_: 2, raising=False)
    with pytest.raises(RuntimeError, match="error 2 of cuda:1.*: lower --encoder-cache-memory"):
        PinnedMemory(4096, CUDA)

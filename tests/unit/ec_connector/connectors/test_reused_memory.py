"""Ordinary memory of host copies is given out again once nothing refers to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from triptych.ec_connector.connectors.host_buffers import HostBuffer, ReusedMemory

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

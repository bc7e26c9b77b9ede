"""Mappings that a worker keeps of host copies in files."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from triptych.base.types import ItemPlan
from triptych.integrations.vllm.host_copies import CopyFolder, HostCopies, HostCopy
from triptych.integrations.vllm.mapped_copies import MappedCopies
from triptych.integrations.vllm.rows import host_body, read_rows, source_of

CPU = torch.device("cpu")
#: Rows of 16 bytes that make a file whose mapping is kept.
ROWS = (1 << 20) // 16


@pytest.fixture
def copies(tmp_path: Path) -> HostCopies:
    return HostCopies(64 << 20, CopyFolder(str(tmp_path)))


def filled(copies: HostCopies, value: float, rows: int = ROWS) -> HostCopy:
    plan = ItemPlan("a" * 64, "b" * 64, "image", rows, 4, "float32", rows)
    copy = copies.allocate(plan)
    assert isinstance(copy, HostCopy) and isinstance(copy.memory, memoryview)
    copy.memory[:] = host_body(torch.full((rows, 4), value))()
    return copy


def read(copy: HostCopy, mapped: MappedCopies) -> torch.Tensor:
    return read_rows(source_of(copy), CPU, torch.float32, mapped=mapped)


def removed(copy: HostCopy) -> str:
    """Removes the copy's file, as the scheduler does for want of budget; its path."""
    assert copy.file is not None and isinstance(copy.memory, memoryview)
    copy.memory.release()
    copy.file.close()
    return copy.file.path


def open_files(path: str) -> int:
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
    return sum(link.removesuffix(" (deleted)") == path for link in links)


@pytest.mark.parametrize("rows", [ROWS, ROWS * 3 // 4, ROWS * 3 // 2])
def test_a_file_that_is_used_again_is_read_right_and_mapped_again_only_where_it_has_grown(
    copies: HostCopies, rows: int
) -> None:
    mapped = MappedCopies()
    first = filled(copies, 1.0)
    seen = read(first, mapped)
    place, path = seen.data_ptr(), first.path
    del seen
    copies.free(first)
    second = filled(copies, 2.0, rows)
    assert second.path == path
    again = read(second, mapped)
    assert (again.data_ptr() == place) is (rows <= ROWS)
    assert again.shape == (rows, 4) and bool((again == 2.0).all())


def test_a_kept_mapping_keeps_its_file_from_others_while_rows_are_in_it_and_not_longer(
    copies: HostCopies,
) -> None:
    mapped = MappedCopies()
    first = filled(copies, 1.0)
    # Two items of a batch that are one.
    one, other = read(first, mapped), read(first, mapped)
    path = first.path
    copies.free(first)
    del one
    second = filled(copies, 2.0)
    assert second.path != path
    assert bool((other == 1.0).all())
    del other
    assert filled(copies, 3.0).path == path


def test_memory_of_a_removed_file_is_freed_though_its_mapping_was_kept(copies: HostCopies) -> None:
    mapped = MappedCopies()
    first = filled(copies, 1.0)
    read(first, mapped)
    file = os.open(first.path, os.O_RDONLY)
    path = removed(first)
    assert os.fstat(file).st_blocks == 0
    os.close(file)
    # The descriptor goes with the next new mapping.
    assert open_files(path) > 0
    kept = read(filled(copies, 2.0), mapped)
    gc.collect()
    assert open_files(path) == 0
    del kept


def test_rows_in_a_removed_file_stay_until_they_are_dropped(copies: HostCopies) -> None:
    mapped = MappedCopies()
    first = filled(copies, 1.0)
    rows = read(first, mapped)
    path = removed(first)
    assert bool((rows == 1.0).all())
    del rows
    gc.collect()
    assert open_files(path) == 0

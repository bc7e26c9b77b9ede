"""Host copies: their budget, and the files in which worker processes read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.base.types import ItemPlan
from triptych.integrations.vllm.host_copies import CopyFolder, HostCopies, HostCopy


def plan(rows: int) -> ItemPlan:
    return ItemPlan("a" * 64, "n" * 64, "image", rows, 4, "float32", rows)


def allocated(copies: HostCopies, rows: int) -> HostCopy:
    copy = copies.allocate(plan(rows))
    assert isinstance(copy, HostCopy)
    return copy


def test_copies_fill_the_budget_to_the_byte_and_say_what_is_missing():
    copies = HostCopies(64)
    first = allocated(copies, 3)
    assert copies.allocate(plan(2)) == 16
    second = allocated(copies, 1)
    assert copies.used == 64
    copies.free(first)
    assert copies.used == 16
    copies.free(second)
    assert copies.used == 0


def test_a_copy_in_a_file_is_read_by_its_path(tmp_path):
    copies = HostCopies(1 << 20, CopyFolder(str(tmp_path)))
    copy = allocated(copies, 2)
    copy.memory[:] = bytes(range(32))
    assert Path(copy.path).read_bytes() == bytes(range(32))
    copies.free(copy)
    assert not Path(copy.path).exists()
    copies.close()
    assert list(tmp_path.iterdir()) == []


def test_a_copy_of_no_rows_needs_no_file(tmp_path):
    copies = HostCopies(1 << 20, CopyFolder(str(tmp_path)))
    copy = allocated(copies, 0)
    assert (copy.path, len(copy.memory)) == ("", 0)
    copies.free(copy)


def test_a_file_system_without_room_is_an_error_and_no_signal(tmp_path, monkeypatch):
    def full(file: int, start: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    copies = HostCopies(1 << 20, CopyFolder(str(tmp_path)))
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        copies.allocate(plan(2))
    assert copies.used == 0
    assert [path.name for path in next(tmp_path.iterdir()).iterdir()] == ["lock"]


def test_a_transfer_that_still_looks_at_a_copy_does_not_break_its_end(tmp_path):
    copies = HostCopies(1 << 20, CopyFolder(str(tmp_path)))
    copy = allocated(copies, 2)
    assert copy.mapped is not None
    late = memoryview(copy.mapped)
    copies.free(copy)
    assert copies.used == 0
    assert len(late) == 32


def test_the_folder_of_a_process_that_was_killed_is_removed_by_the_next_one(tmp_path):
    alive = CopyFolder(str(tmp_path))
    killed = tmp_path / "triptych-ec-killed"
    killed.mkdir()
    (killed / "lock").touch()
    (killed / "1").write_bytes(bytes(100))
    (tmp_path / "another-program").mkdir()
    CopyFolder(str(tmp_path))
    assert not killed.exists()
    assert alive.path.exists()
    assert (tmp_path / "another-program").exists()
    alive.close()
    alive.close()
    assert not alive.path.exists()

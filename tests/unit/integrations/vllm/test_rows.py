"""Rows of items, and their copies on the host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.processes.cluster import wait_for
from triptych.base.errors import ConfigError
from triptych.base.machine.copy_stream import CopyStream
from triptych.base.machine.device import Device
from triptych.base.types import ItemPlan
from triptych.ec_connector.connectors.host_buffers import PinnedMemory, PinnedPool, bytes_of
from triptych.ec_connector.int8_rows import packed, unpacked
from triptych.integrations import vllm
from triptych.integrations.vllm import options
from triptych.integrations.vllm.host_copies import LARGE_BYTES, CopyFolder, HostCopies, HostCopy, locked_pool
from triptych.integrations.vllm.requests import SaveOrder
from triptych.integrations.vllm.rows import CopySource, host_body, plan_to_save, read_rows, source_of

CPU = torch.device("cpu")
KEY, NAMESPACE = "a" * 64, "b" * 64


@pytest.mark.parametrize("in_a_file", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_arrive_as_they_were_and_outlive_their_copy(tmp_path, in_a_file, dtype):
    rows = torch.arange(12, dtype=torch.float32).reshape(3, 4).to(dtype)
    plan = ItemPlan(KEY, NAMESPACE, "image", 3, 4, str(dtype).removeprefix("torch."), 3)
    copies = HostCopies(1 << 20, CopyFolder(str(tmp_path)) if in_a_file else None)
    copy = copies.allocate(plan)
    copy.memory[:] = host_body(rows)()
    source = source_of(copy)
    assert (source.memory is None) is in_a_file
    read = read_rows(source, CPU, dtype)
    copies.free(copy)
    copies.allocate(plan).memory[:] = bytes(plan.nbytes)
    assert torch.equal(read, rows)


@pytest.mark.parametrize("in_a_file", [False, True])
@pytest.mark.parametrize("count", [3, 3 * LARGE_BYTES // 16])
def test_rows_in_8_bits_become_the_models_and_outlive_their_copy(tmp_path, in_a_file, count):
    rows = torch.randn(count, 4)
    plan = ItemPlan(KEY, NAMESPACE, "image", count, 4, "int8", count, scales=2)
    copies = HostCopies(1 << 24, CopyFolder(str(tmp_path)) if in_a_file else None)
    copy = copies.allocate(plan)
    copy.memory[:] = bytes_of(packed(rows, 2))
    read = read_rows(source_of(copy), CPU, torch.bfloat16)
    copies.free(copy)
    copies.allocate(plan).memory[:] = bytes(plan.nbytes)
    assert torch.equal(read, unpacked(packed(rows, 2), 2, torch.bfloat16))


def test_rows_take_the_models_dtype():
    memory = memoryview(bytearray(torch.tensor([[1.5, -2.0]]).numpy().tobytes()))
    read = read_rows(CopySource(KEY, 1, 2, "float32", memory=memory), CPU, torch.bfloat16)
    assert read.dtype == torch.bfloat16
    assert read.tolist() == [[1.5, -2.0]]


def test_the_bytes_to_save_are_a_copy_of_the_rows_alone():
    batch = torch.arange(24, dtype=torch.float32).reshape(6, 4)
    body = host_body(batch[2:4])()
    batch.zero_()
    assert torch.frombuffer(body, dtype=torch.float32).tolist() == list(range(8, 16))


def test_the_plan_to_save_is_that_of_the_rows():
    order = SaveOrder(KEY, "image", 5, ((0, 2), (3, 1)), (1, 2, 6))
    plan = plan_to_save(order, NAMESPACE, torch.zeros(3, 4, dtype=torch.bfloat16))
    assert plan == ItemPlan(KEY, NAMESPACE, "image", 3, 4, "bfloat16", 5, ((0, 2), (3, 1)), (1, 2, 6))


_PARENT = """
import multiprocessing, time
from triptych.integrations.vllm.engine import end_with_parent

def engine():
    end_with_parent()
    time.sleep(60)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=engine)
    child.start()
    print(child.pid, flush=True)
    child.join()
"""


def test_the_child_of_a_killed_process_ends(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(20)
    wait_for("the child to end", lambda: not runs(child))


def runs(pid: int) -> bool:
    """Whether the process is there; a zombie does not run."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("found", ["0.32.0", "0.33.0", "0.33.1+cu130", "0.32.2rc1", "0.33"])
def test_a_supported_version_is_accepted(found):
    options.check_version(found)


@pytest.mark.parametrize("found", ["0.31.0", "0.34.0", "0.3.3", "0.320.0", "1.0.0", "dev", ""])
def test_another_version_is_one_error_that_names_it_and_the_remedy(found):
    with pytest.raises(ConfigError) as raised:
        options.check_version(found)
    assert f"this is vLLM {found}:" in str(raised.value)
    assert "install vllm==0.33.*" in str(raised.value)


def test_the_connector_is_refused_before_another_vllm_is_imported(monkeypatch):
    monkeypatch.setattr(options, "version", lambda package: "0.40.0")
    with pytest.raises(ConfigError, match=r"this is vLLM 0\.40\.0"):
        vllm.__getattr__("TriptychECConnector")


def plan(rows: int) -> ItemPlan:
    return ItemPlan("a" * 64, "n" * 64, "image", rows, 4, "float32", rows)


def allocated(copies: HostCopies, rows: int) -> HostCopy:
    return copies.allocate(plan(rows))


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
    path = Path(copy.path)
    assert path.read_bytes() == bytes(range(32))
    copies.free(copy)
    assert not path.exists()
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
    late = memoryview(copy.file.mapped)
    copies.free(copy)
    assert copies.used == 0
    assert len(late) == 32


#: Rows of 16 bytes that make a copy large enough to be kept.
LARGE = LARGE_BYTES // 16


def filled(copies: HostCopies, rows: int, value: float) -> HostCopy:
    copy = allocated(copies, rows)
    copy.memory[:] = host_body(torch.full((rows, 4), value))()
    return copy


@pytest.mark.parametrize("rows", [LARGE, LARGE * 3 // 4, LARGE * 3 // 2])
def test_the_file_of_a_freed_copy_is_that_of_the_next_one_of_its_size(tmp_path, rows):
    copies = HostCopies(1 << 20, CopyFolder(str(tmp_path)))
    first = filled(copies, LARGE, 1.0)
    path = first.path
    copies.free(first)
    second = filled(copies, rows, 2.0)
    assert second.path == path
    assert Path(path).stat().st_size == rows * 16
    assert read_rows(source_of(second), CPU, torch.float32).tolist() == [[2.0] * 4] * rows


def test_a_file_whose_rows_vllm_still_has_is_given_to_no_other_item(tmp_path):
    copies = HostCopies(1 << 20, CopyFolder(str(tmp_path)))
    first = filled(copies, LARGE, 1.0)
    path, read = first.path, read_rows(source_of(first), CPU, torch.float32)
    copies.free(first)
    second = filled(copies, LARGE, 2.0)
    assert second.path != path
    assert read.tolist() == [[1.0] * 4] * LARGE
    del read
    copies.free(second)
    assert allocated(copies, LARGE).path in (path, second.path)


def test_memory_whose_rows_vllm_still_has_is_given_to_no_other_item_and_then_to_one():
    copies = HostCopies(1 << 20)
    first = filled(copies, LARGE, 1.0)
    read = read_rows(source_of(first), CPU, torch.float32)
    place = read.data_ptr()
    copies.free(first)
    second = filled(copies, LARGE, 2.0)
    assert read.tolist() == [[1.0] * 4] * LARGE
    del read
    copies.free(second)
    places = [read_rows(source_of(filled(copies, LARGE, 3.0)), CPU, torch.float32).data_ptr() for _ in "ab"]
    assert place in places


def test_files_kept_for_reuse_and_copies_stay_within_the_budget(tmp_path):
    folder = CopyFolder(str(tmp_path))
    copies = HostCopies(4 * LARGE_BYTES, folder)
    for copy in [filled(copies, LARGE, 1.0) for _ in range(4)]:
        copies.free(copy)
    held = filled(copies, 3 * LARGE, 2.0)
    files = [path for path in folder.path.iterdir() if path.name != "lock"]
    assert sum(path.stat().st_size for path in files) <= 4 * LARGE_BYTES
    assert Path(held.path) in files


def test_a_kept_file_that_cannot_grow_is_an_error_and_goes(tmp_path, monkeypatch):
    def full(file: int, start: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    copies = HostCopies(1 << 20, CopyFolder(str(tmp_path)))
    copies.free(filled(copies, LARGE, 1.0))
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        allocated(copies, LARGE + 1)
    assert copies.used == 0
    assert [path.name for path in next(tmp_path.iterdir()).iterdir()] == ["lock"]


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


class RecordedStream(CopyStream):
    """A stream that notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def keep(self, tensor: torch.Tensor, *, model: bool = False) -> None:
        self.calls.append("keep" + " for the model" * model)

    def block_model(self) -> None:
        self.calls.append("block")


def test_page_locked_copies_fill_free_pieces_and_the_model_waits_for_their_rows():
    pool = PinnedPool(PinnedMemory(64))
    copies = HostCopies(64, pool=pool)
    first, second, third = (allocated(copies, 1) for _ in range(3))
    copies.free(second)
    split = copies.allocate(plan(2))
    assert len(split.pieces) == 2
    split.memory.write(0, bytes(host_body(torch.arange(8.0).reshape(2, 4))()))
    stream = RecordedStream()
    read = read_rows(source_of(split), CPU, torch.bfloat16, stream)
    assert read.dtype == torch.bfloat16
    assert read.tolist() == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    assert stream.calls == ["keep for the model", "block"]
    for copy in (first, third, split):
        copies.free(copy)
    assert (copies.used, pool.num_free) == (0, 64)


def test_memory_that_cannot_be_locked_is_said_and_done_without(monkeypatch, caplog):
    monkeypatch.setattr(Device, "on_host", False)
    monkeypatch.setattr(Device, "lock_pages", lambda self, address, nbytes: 2)
    assert locked_pool(4096, CPU) is None
    assert "host copies are not page-locked" in caplog.text

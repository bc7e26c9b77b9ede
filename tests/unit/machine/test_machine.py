"""What a machine is, and who starts on it first."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from support.fakes.fake_cuda import fake_cuda
from triptych.base.config.worker import GRAPH_MODES
from triptych.base.errors import ConfigError
from triptych.base.machine.device import Device
from triptych.base.machine.graphs import EagerStatic, graph_backend
from triptych.base.machine.heap import trim_heap
from triptych.base.machine.resources import MAX_KIND_CHARS, check_temporary_folder, worker_kind
from triptych.base.machine.start_lock import StartLock

#: Frees every other of 400 blocks, each too small for a mapping of its own: none is at the heap's end.
_HOLES = """
from triptych.base.machine.heap import trim_heap

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

blocks = [bytearray(100_000) for _ in range(800)]
for block in blocks:
    block[::4096] = b"x" * len(block[::4096])
del blocks[::2]
before = resident()
trim_heap()
print(before - resident())
"""


def test_holes_in_the_heap_are_given_back():
    run = subprocess.run([sys.executable, "-c", _HOLES], capture_output=True, text=True, timeout=300)
    assert int(run.stdout) > 20_000_000, run.stderr


def test_a_c_library_without_it_is_no_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    trim_heap()


def test_where_temporary_files_can_be_written_all_is_well():
    check_temporary_folder()


def test_a_read_only_root_without_a_tmp_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/nowhere"])
    with pytest.raises(ConfigError, match="--tmpfs /tmp.*emptyDir.*TMPDIR"):
        check_temporary_folder()


def machine(folder: Path, cpuinfo: str) -> Path:
    (folder / "proc").mkdir()
    (folder / "proc/cpuinfo").write_text(cpuinfo)
    return folder


def test_the_kind_of_a_cpu_worker_names_its_model_and_threads(tmp_path: Path) -> None:
    root = machine(tmp_path, "processor\t: 0\nmodel name\t: AMD EPYC  9B14\nflags\t: fpu\n")
    assert worker_kind("", "cpu", 2, root=root) == "cpu AMD EPYC 9B14 x2 threads"
    shared = worker_kind("", "cpu", 4, ranks=2, root=root)
    assert shared == "cpu AMD EPYC 9B14 x4 threads x2 ranks", "as fast as others with as many ranks only"


def test_the_flag_overrides_the_device() -> None:
    assert worker_kind("B60 in rack 4", "cuda:0", 1) == "B60 in rack 4"


@pytest.mark.parametrize("given", ["x" * (MAX_KIND_CHARS + 1), "two\nlines"])
def test_a_kind_that_is_too_long_or_not_printable_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="--worker-kind"):
        worker_kind(given, "cpu", 1)


CPU = torch.device("cpu")


def test_off_and_auto_need_no_graphs_on_a_cpu() -> None:
    assert graph_backend("off", CPU, "--decode-graphs") is None
    assert graph_backend("auto", CPU, "--decode-graphs") is None


def test_static_is_a_backend_of_every_device() -> None:
    backend = graph_backend("static", CPU, "--decode-graphs")
    assert isinstance(backend, EagerStatic)
    assert backend.mode in GRAPH_MODES


def test_cuda_graphs_on_a_cpu_are_an_error_that_names_flag_device_and_remedy() -> None:
    with pytest.raises(ConfigError, match="--encoder-graphs cuda needs --device cuda, not cpu: use .* auto"):
        graph_backend("cuda", CPU, "--encoder-graphs")


def test_a_replay_reads_what_the_buffers_hold_now() -> None:
    values, result = torch.zeros(3), torch.zeros(3)
    captured = EagerStatic().capture(lambda: result.copy_(values * 2))
    values.copy_(torch.tensor([1.0, 2.0, 3.0]))
    captured.replay()
    assert result.tolist() == [2.0, 4.0, 6.0]


NAME = f"test-{os.getpid()}"


def test_the_second_starts_when_the_first_has_what_it_needs() -> None:
    order: list[str] = []
    first = StartLock(NAME).acquire()

    def second() -> None:
        lock = StartLock(NAME).acquire()
        order.append("second")
        lock.release()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second)
        StartLock(NAME + "-other").acquire().release()
        StartLock("").acquire().release()
        order.append("first")
        first.release()
        waiting.result(30)
    assert order == ["first", "second"]


def test_a_process_that_dies_while_it_starts_blocks_nobody() -> None:
    take = f"from triptych.base.machine.start_lock import StartLock; StartLock({NAME!r}).acquire()"
    code = f"import os; {take}; os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 9
    StartLock(NAME, patience=0).acquire().release()


def test_one_that_waits_in_vain_goes_on_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    first = StartLock(NAME).acquire()
    second = StartLock(NAME, patience=0).acquire()
    assert "another process still starts on" in caplog.text and "--device-memory" in caplog.text
    second.release()
    first.release()


def test_a_gpu_has_one_name_whatever_its_number_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    cards = {0: "GPU-a", 1: "GPU-b"}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=cards[device.index])
    )
    names = [Device.of(torch.device(name)).start_name for name in ("cpu", "cuda", "cuda:1")]
    assert names == ["", "cuda-GPU-a", "cuda-GPU-b"]

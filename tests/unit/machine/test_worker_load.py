"""The load that a worker reports: its busy share, its name and memory, and its GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import msgspec
import pytest

from triptych.base.engine_beat import BUSY_SECONDS, BusyClock
from triptych.base.machine.gpu_load import gpu_reader, read_gpu
from triptych.base.machine.worker_load import GpuLoad, WorkerLoad, decode_load, read_load


class Now:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def worked(clock: BusyClock, now: Now, seconds: float) -> None:
    with clock.working(True):
        now.seconds += seconds


def test_an_engine_that_never_rests_is_wholly_busy_in_the_middle_of_a_step_too() -> None:
    now = Now()
    clock = BusyClock(now)
    for _ in range(20):
        worked(clock, now, 1.0)
        assert clock.share() == 1.0
    with clock.working(True):
        now.seconds += 3.0
        assert clock.share() == 1.0


def test_waits_inside_of_the_work_are_no_work() -> None:
    now = Now()
    clock = BusyClock(now)
    with clock.working(True):
        now.seconds += 1.0
        with clock.working(False):
            now.seconds += 3.0
    assert clock.share() == pytest.approx(0.25)
    with clock.working(False):
        now.seconds += 4.0
    assert clock.share() == pytest.approx(0.125)


def test_the_share_is_of_the_last_seconds_alone() -> None:
    now = Now()
    clock = BusyClock(now)
    for _ in range(int(BUSY_SECONDS)):
        worked(clock, now, 1.0)
        clock.share()
    for second in range(int(BUSY_SECONDS)):
        now.seconds += 1.0
        assert clock.share() == pytest.approx(1.0 - (second + 1) / BUSY_SECONDS)
    assert clock.share() == 0.0


def test_a_report_is_read_as_it_was_written_and_anything_else_is_none() -> None:
    load = WorkerLoad("encoder-1", 0.5, 1 << 30, GpuLoad(0.25, 1, 2))
    assert decode_load(msgspec.json.encode(load)) == load
    assert decode_load(b'{"busy": 7, "later": [1], "name": "' + b"n" * 100 + b'"}') == WorkerLoad(
        "n" * 64, 1.0
    )
    for data in (b"", b"\xff", b"[]", b'{"busy": "x"}', msgspec.json.encode(WorkerLoad("n" * 5000))):
        assert decode_load(data) is None


def test_a_meter_names_the_worker_as_its_supervisor_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_SERVICE", "encoder-1")
    load = read_load(None, lambda: GpuLoad(0.5, 3, 4))
    assert (load.name, load.busy, load.gpu) == ("encoder-1", None, GpuLoad(0.5, 3, 4))
    assert load.memory_bytes > 1 << 20


class Driver:
    """NVIDIA's library with one GPU; `error` is what it answers to the question about its use."""

    def __init__(self, error: int = 0) -> None:
        self.error = error

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        return 0 if uuid == b"GPU-1" else 6

    def nvmlDeviceGetUtilizationRates(self, handle: Any, use: Any) -> int:
        ctypes.cast(use, ctypes.POINTER(ctypes.c_uint))[0] = 71
        return self.error

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        numbers = ctypes.cast(memory, ctypes.POINTER(ctypes.c_ulonglong))
        numbers[0], numbers[1], numbers[2] = 24, 8, 16
        return 0


def test_a_gpu_is_read_by_the_drivers_library() -> None:
    assert read_gpu(Driver(), "GPU-1") == GpuLoad(0.71, 16, 24)


def test_a_gpu_that_tells_nothing_is_left_out() -> None:
    assert read_gpu(Driver(error=3), "GPU-1") is None
    assert read_gpu(Driver(), "GPU-2") is None


def test_a_worker_on_a_cpu_has_no_gpu() -> None:
    assert gpu_reader("cpu") is None

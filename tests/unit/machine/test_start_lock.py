"""Two workers on one device start one after the other; those on others, and on CPUs, at once."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from support.fakes.fake_cuda import fake_cuda
from triptych.base.machine.device import Device
from triptych.base.machine.start_lock import StartLock

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

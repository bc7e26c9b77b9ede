"""Freed memory goes back to the system."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from triptych.base.machine.heap import trim_heap

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

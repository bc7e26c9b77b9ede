"""In a process of a cluster: records which functions of the product are called while a test says so.

Python imports this module at its start from any folder of PYTHONPATH. The file that TRIPTYCH_TEST_SPINE names
holds one byte, the phase, which all processes map (`support/processes/spine.py` has the numbers).
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

OFF, IDLE, WRITE = 0, 1, 2

_file = Path(os.environ["TRIPTYCH_TEST_SPINE"])
_root = os.environ["TRIPTYCH_TEST_ROOT"] + os.sep
with _file.open("r+b") as opened:
    _phase = mmap.mmap(opened.fileno(), 1)
_idle: set[tuple[str, str]] = set()
_calls: list[tuple[int, int, str, str, str]] = []


def _profile(frame: FrameType, event: str, _: object) -> None:
    phase = _phase[0]
    if phase == OFF or event != "call":
        return
    code = frame.f_code
    file = _path(code)
    if not file:
        return
    if phase == WRITE:
        _write()
    elif phase == IDLE:
        _idle.add((file, code.co_qualname))
    elif code.co_code[frame.f_lasti + 1] & 3 == 0:  # RESUME 0: a frame's start, no coroutine that goes on
        _calls.append((phase, threading.get_ident(), _caller(frame), file, code.co_qualname))


@cache
def _path(code: CodeType) -> str:
    """The file in the product, from its root; empty for others."""
    name = os.path.realpath(code.co_filename)
    return name.removeprefix(_root) if name.startswith(_root) else ""


def _caller(frame: FrameType) -> str:
    """The nearest file of the product on the stack; empty for none."""
    above = frame.f_back
    while above is not None:
        if file := _path(above.f_code):
            return file
        above = above.f_back
    return ""


def _write() -> None:
    if _calls:
        calls, _calls[:] = _calls[:], []
        scratch = _file.with_name(f"{os.getpid()}.new")
        scratch.write_text(json.dumps({"idle": sorted(_idle), "calls": calls}))
        scratch.replace(_file.with_name(f"{os.getpid()}.json"))


threading.setprofile(_profile)
sys.setprofile(_profile)

"""In a worker's process: makes its engine's thread die, hang or sleep where a test says so.

Python imports this module at its start from any folder of PYTHONPATH. An engine that is about to compute
looks for the file that `support.chaos.faults` leaves for its process, takes it away and does what it says,
once and after as many computations as it says. With TRIPTYCH_TEST_TOWER_SECONDS an item takes so much longer
in the tower, and with TRIPTYCH_TEST_STEP_SECONDS a step in a PD worker, without a core: more workers are then
faster even on a machine that has no more cores.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import os
import signal
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

#: Pool, class and method that compute, by module. A rank's orders are for its own process, `encoder-0-rank1`.
_TARGETS = {
    "triptych.pd_worker.runner.model_runner": ("pd", "ModelRunner", "_compute"),
    "triptych.encoder_worker.engine": ("encoder", "EncoderEngine", "_encode"),
    "triptych.encoder_worker.ranks.share_encoder": ("rank", "ShareEncoder", "encode"),
}
#: By pool: the variable with the seconds that it sleeps.
_SECONDS = {"encoder": "TRIPTYCH_TEST_TOWER_SECONDS", "pd": "TRIPTYCH_TEST_STEP_SECONDS"}
_FOR_EVER = 3600


class Panic(BaseException):
    """What is no Exception, as pyo3's panics are."""


def _die() -> None:
    raise Panic("the test says so")


def _hang() -> None:
    time.sleep(_FOR_EVER)


def _hang_with_the_interpreter() -> None:
    # Unlike CDLL, PyDLL keeps the interpreter's lock during the call.
    ctypes.PyDLL(None).sleep(_FOR_EVER)


def _lose_the_device() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def _kill_the_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop_the_process() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


_FAULTS = {
    "is_killed": _kill_the_process,
    "is_stopped": _stop_the_process,
    "dies": _die,
    "hangs": _hang,
    "holds_the_interpreter": _hang_with_the_interpreter,
    "loses_the_device": _lose_the_device,
}


#: By pool: the fault that was ordered, and how many computations come before it.
_ordered: dict[str, tuple[str, int]] = {}


def _fault_of(pool: str) -> None:
    """What the test wants of this process's engine of `pool`, if anything, when it is time."""
    service = os.environ.get("TRIPTYCH_SERVICE", "")
    if pool not in _ordered:
        order = Path(os.environ["TRIPTYCH_TEST_FAULTS"]) / f"{service}.{pool}"
        try:
            fault, after = order.read_text().split()
            order.unlink()
        except FileNotFoundError:
            return
        _ordered[pool] = fault, int(after)
    fault, left = _ordered[pool]
    _ordered[pool] = fault, left - 1
    if left == 0:
        sys.stderr.write(f"{service}: its {pool} engine {fault}\n")
        sys.stderr.flush()
        _FAULTS[fault]()


def _before(pool: str, items: Sequence[Any]) -> None:
    """What happens before an engine of `pool` computes."""
    if "TRIPTYCH_TEST_FAULTS" in os.environ:
        _fault_of(pool)
    times = len(items) if pool == "encoder" else 1
    time.sleep(float(os.environ.get(_SECONDS.get(pool, ""), "0")) * times)


def _patch(module: ModuleType) -> None:
    pool, owner_name, method = _TARGETS[module.__name__]
    owner = getattr(module, owner_name)
    compute = getattr(owner, method)

    def computes(self: Any, *args: Any, **kwargs: Any) -> Any:
        _before(pool, args[0])
        return compute(self, *args, **kwargs)

    setattr(owner, method, computes)


class _PatchingLoader(importlib.abc.Loader):
    """A module's own loader, and the patch after it."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _patch(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _TARGETS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader)
        return spec


if {"TRIPTYCH_TEST_FAULTS", *_SECONDS.values()} & os.environ.keys():
    sys.meta_path.insert(0, _Finder())

"""In a worker's process: makes its engine's thread die, hang or sleep where a test says so.

Python imports this module at its start from any folder of PYTHONPATH. An engine that is about to compute
looks for the file that `support.chaos.faults` leaves for its process, takes it away and does what it says,
once and after as many computations as it says. With TRIPTYCH_TEST_TOWER_SECONDS an item takes so much longer
in the tower, and with TRIPTYCH_TEST_STEP_SECONDS a step in a PD worker, without a core: more workers are then
faster even on a machine that has no more cores. TRIPTYCH_TEST_GATES names the folder of gates: while there is
one of a pool, each of its engines computes once for each byte that is added to it. TRIPTYCH_TEST_MUTANT is
for `mutants.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from support.engine_faults import mutants
from support.engine_faults.import_patches import patch_when_imported

#: Pool, class and method that compute, by module. A rank's orders are for its own process, `encoder-0-rank1`.
_TARGETS = {
    "triptych.pd_worker.runner.model_runner": ("pd", "ModelRunner", "_compute"),
    "triptych.encoder_worker.engine": ("encoder", "EncoderEngine", "_encode"),
    "triptych.encoder_worker.ranks.tower": ("rank", "ShareEncoder", "encode"),
}
#: By pool: the variable with the seconds that it sleeps.
_SECONDS = {"encoder": "TRIPTYCH_TEST_TOWER_SECONDS", "pd": "TRIPTYCH_TEST_STEP_SECONDS"}
#: A file that gets the key of every item that an encoder's tower begins with.
_TOWERS = "TRIPTYCH_TEST_TOWERS"
#: Encoders take no leases: every one computes what it is asked for.
_NO_LEASES = "TRIPTYCH_TEST_NO_LEASES"
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


#: By pool: the size of the gate for which its engine has computed.
_passed: dict[str, int] = {}


def _wait_at_gate(pool: str) -> None:
    gate = Path(os.environ["TRIPTYCH_TEST_GATES"]) / f"{pool}.gate"
    while gate.exists():
        with contextlib.suppress(FileNotFoundError):
            size = gate.stat().st_size
            if _passed.get(pool, 0) < size:
                _passed[pool] = size
                return
        time.sleep(0.002)
    _passed.pop(pool, None)


def _before(pool: str, items: Sequence[Any]) -> None:
    """What happens before an engine of `pool` computes."""
    if "TRIPTYCH_TEST_GATES" in os.environ:
        _wait_at_gate(pool)
    if "TRIPTYCH_TEST_FAULTS" in os.environ:
        _fault_of(pool)
    if pool == "encoder" and _TOWERS in os.environ:
        with Path(os.environ[_TOWERS]).open("a") as towers:
            towers.writelines(f"{item.plan.mm_hash}\n" for item in items)
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


def _without_leases(module: ModuleType) -> None:
    async def acquire(self: Any, mm_hash: str, **options: Any) -> None:
        return None

    module.LeaseKeeper.acquire = acquire


if _NO_LEASES in os.environ:
    patch_when_imported({"triptych.registry.lease_keeper": _without_leases})
if {"TRIPTYCH_TEST_FAULTS", "TRIPTYCH_TEST_GATES", _TOWERS, *_SECONDS.values()} & os.environ.keys():
    patch_when_imported(dict.fromkeys(_TARGETS, _patch))
if mutants.VARIABLE in os.environ:
    patch_when_imported(mutants.PATCHES)

"""Load of a worker's process, which goes with its answers to health checks: name, busy share, memory, GPU."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import msgspec

from triptych.base.engine_beat import BusyClock
from triptych.base.types import prepared

#: Trailing metadata of a health check of one registration: a `WorkerLoad` as JSON.
LOAD_HEADER = "triptych-load-bin"
#: Characters of a name.
_MAX_NAME = 64
#: Bytes of an answer that is read.
_MAX_BYTES = 4096


class GpuLoad(msgspec.Struct, frozen=True):
    """A GPU with all its processes: the share of the last second in which it computed, and its memory."""

    use: float
    memory_bytes: int
    max_memory_bytes: int


class WorkerLoad(msgspec.Struct, frozen=True):
    """The load of one worker. `name`: the supervisor's or the pod's, empty without one; `busy`: the share of
    the last ten seconds in which its engine worked, None where that is not measured."""

    name: str = ""
    busy: float | None = None
    memory_bytes: int = 0
    gpu: GpuLoad | None = None


def decode_load(data: bytes) -> WorkerLoad | None:
    """None for what no worker writes. A share is between 0 and 1, whatever a worker sends."""
    try:
        load = msgspec.json.decode(data[: _MAX_BYTES + 1], type=prepared(WorkerLoad))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    gpu = load.gpu and msgspec.structs.replace(load.gpu, use=_share(load.gpu.use))
    busy = None if load.busy is None else _share(load.busy)
    return msgspec.structs.replace(load, name=load.name[:_MAX_NAME], busy=busy, gpu=gpu)


def _share(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def read_load(busy: BusyClock | None, gpu: Callable[[], GpuLoad | None] | None = None) -> WorkerLoad:
    """The load of this process now; `gpu` reads its device's GPU."""
    return WorkerLoad(
        name=os.environ.get("TRIPTYCH_SERVICE", ""),
        busy=None if busy is None else round(busy.share(), 4),
        memory_bytes=resident_bytes(),
        gpu=None if gpu is None else gpu(),
    )


def resident_bytes() -> int:
    """Memory that this process has now; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * resource.getpagesize()

"""Load of a GPU, by NVIDIA's driver library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

from triptych.base.machine.worker_load import GpuLoad


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def gpu_reader(device: str) -> Callable[[], GpuLoad | None] | None:
    """A function that reads the GPU of a torch device; None for another device, or without the library."""
    if not device.startswith("cuda"):
        return None
    import torch

    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = str(torch.cuda.get_device_properties(torch.device(device)).uuid)
    except (OSError, AttributeError, RuntimeError, AssertionError):
        return None
    return partial(read_gpu, library, uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")


def read_gpu(library: Any, uuid: str) -> GpuLoad | None:
    """None where the driver does not tell, as of a slice of a GPU."""
    handle, use, memory = ctypes.c_void_p(), _Utilization(), _Memory()
    failed = (
        library.nvmlInit_v2()
        or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
        or library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(use))
        or library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    )
    return None if failed else GpuLoad(use.gpu / 100, memory.used, memory.total)

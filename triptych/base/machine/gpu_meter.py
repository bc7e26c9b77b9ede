"""Meter of one GPU, by NVIDIA's driver library."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

from triptych.base.machine.worker_load import GpuLoad

#: Seconds between two readings.
_SECONDS = 1.0


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class GpuMeter:
    """The use of one GPU by NVIDIA's driver library. A thread reads it, so that a driver may hang."""

    def __init__(self, library: Any, uuid: str) -> None:
        self._library = library
        self._uuid = uuid
        self._latest: GpuLoad | None = None
        self._read_at = -_SECONDS
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, device: str) -> GpuMeter | None:
        """The meter of a torch device; None for one that is no GPU of NVIDIA's, or without the library."""
        if not device.startswith("cuda"):
            return None
        import torch

        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            uuid = str(torch.cuda.get_device_properties(torch.device(device)).uuid)
        except (OSError, AttributeError, RuntimeError, AssertionError):
            return None
        return cls(library, uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")

    def latest(self) -> GpuLoad | None:
        """The newest reading; begins another one where that is older than a second."""
        reading = self._thread is not None and self._thread.is_alive()
        if not reading and time.monotonic() - self._read_at >= _SECONDS:
            self._read_at = time.monotonic()
            self._thread = threading.Thread(target=self.read, name="gpu meter", daemon=True)
            self._thread.start()
        return self._latest

    def read(self) -> None:
        """One reading; None where the driver gives none, as for a slice of a GPU."""
        library, handle = self._library, ctypes.c_void_p()
        use, memory = _Utilization(), _Memory()
        failed = (
            library.nvmlInit_v2()
            or library.nvmlDeviceGetHandleByUUID(self._uuid.encode(), ctypes.byref(handle))
            or library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(use))
            or library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        )
        self._latest = None if failed else GpuLoad(use.gpu / 100, memory.used, memory.total)

"""Memory of a worker's device, free and used, and host memory for what leaves it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from triptych.base.config import CPU_SHARE, CUDA_CONTEXT_BYTES, CUDA_SHARE
from triptych.base.machine.device import Accelerator, Device
from triptych.base.machine.resources import available_memory


def host_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor in host memory.

    numpy allocates it, which asks for huge pages as torch does not: first written in a quarter of the time.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.from_numpy(np.empty(nbytes, dtype=np.uint8)).view(dtype).view(*shape)


class DeviceMemory(Protocol):
    """One device as one process sees it, in bytes."""

    #: Fraction of the free memory that a worker may use.
    share: float

    def free(self) -> int:
        """Bytes that any process can still allocate."""
        ...

    def used(self) -> int:
        """Bytes that this process has allocated."""
        ...

    def reset_peak(self) -> None:
        """Resets `peak` to the current use."""
        ...

    def peak(self) -> int:
        """The most bytes allocated at once since `reset_peak`."""
        ...


class AcceleratorMemory:
    """An accelerator, by torch's allocator and the driver."""

    share = CUDA_SHARE

    def __init__(self, device: Accelerator) -> None:
        self._device, self._module = device.torch, device.module

    def free(self) -> int:
        return int(self._module.mem_get_info(self._device)[0])

    def used(self) -> int:
        return CUDA_CONTEXT_BYTES + int(self._module.memory_allocated(self._device))

    def reset_peak(self) -> None:
        self._module.synchronize(self._device)
        self._module.empty_cache()
        self._module.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        self._module.synchronize(self._device)
        # Reserved, not allocated: fragments between tensors cannot be used by other processes.
        return CUDA_CONTEXT_BYTES + int(self._module.max_memory_reserved(self._device))


class CpuMemory:
    """The memory of the machine or the cgroup, and this process's resident pages."""

    share = CPU_SHARE

    def free(self) -> int:
        return available_memory()

    def used(self) -> int:
        return _status("VmRSS:")

    def reset_peak(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            # Without it (in a sandbox) the peak is since the process's start: too high, never too low.
            return

    def peak(self) -> int:
        return max(_status("VmHWM:"), self.used())


def memory_of(device: torch.device) -> DeviceMemory:
    """The memory of a torch device."""
    owner = Device.of(device)
    return AcceleratorMemory(owner) if isinstance(owner, Accelerator) else CpuMemory()


def _status(name: str) -> int:
    """Bytes of a line of this process's status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")

"""The memory of the device that a worker computes on: what is free, what it holds, the most it has held."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from triptych.config import CPU_SHARE, CUDA_CONTEXT_BYTES, CUDA_SHARE
from triptych.machine.resources import available_memory


class DeviceMemory(Protocol):
    """One device as one process sees it, in bytes."""

    #: Of what is free, how much a worker may use.
    share: float

    def free(self) -> int:
        """What can still be had, by whomever."""
        ...

    def used(self) -> int:
        """What this process holds."""
        ...

    def reset_peak(self) -> None:
        """From now on `peak` counts anew."""
        ...

    def peak(self) -> int:
        """The most that this process has held at once since then."""
        ...


class CudaMemory:
    """A GPU, by torch's allocator and the driver."""

    share = CUDA_SHARE

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    def used(self) -> int:
        return CUDA_CONTEXT_BYTES + int(torch.cuda.memory_allocated(self._device))

    def reset_peak(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        # Reserved, not allocated: what lies in pieces between tensors is of no use to others.
        return CUDA_CONTEXT_BYTES + int(torch.cuda.max_memory_reserved(self._device))


class CpuMemory:
    """The machine's memory, or the cgroup's, by the kernel's count of this process's pages."""

    share = CPU_SHARE

    def free(self) -> int:
        return available_memory()

    def used(self) -> int:
        return _status("VmRSS:")

    def reset_peak(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            # A sandbox without it counts since the start of the process: too much, never too little.
            return

    def peak(self) -> int:
        return max(_status("VmHWM:"), self.used())


def memory_of(device: torch.device) -> DeviceMemory:
    """The memory of a torch device."""
    return CudaMemory(device) if device.type == "cuda" else CpuMemory()


def _status(name: str) -> int:
    """Bytes of a line of this process's status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")

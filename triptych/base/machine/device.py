"""The devices that workers compute on, besides computing: what differs between them, and their memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from triptych.base.config import CPU_SHARE, CUDA_CONTEXT_BYTES, CUDA_SHARE
from triptych.base.machine.copy_stream import CopyStream, DeviceStream
from triptych.base.machine.resources import available_memory

#: cudaHostRegisterPortable: locked for all devices.
_PORTABLE = 1


class Device:
    """A CPU, and the base of all other devices: device memory is host memory, and no call is asynchronous."""

    #: torch's type of device.
    type: ClassVar[str] = "cpu"
    #: Device memory is host memory, so that nothing is copied between them.
    on_host: ClassVar[bool] = True
    #: Whether graphs of it can be captured (`CudaGraph`).
    captures: ClassVar[bool] = False
    #: torch.distributed's backend between such devices.
    collectives: ClassVar[str] = "gloo"

    def __init__(self, device: torch.device) -> None:
        self.torch = device

    @staticmethod
    def of(device: torch.device) -> Device:
        """The device of this name; KeyError for a type that workers do not serve."""
        return DEVICES[device.type](device)

    @classmethod
    def available(cls) -> bool:
        """Whether this process finds one."""
        return True

    @property
    def start_name(self) -> str:
        """The name of its `StartLock`; "" where workers may start together."""
        return ""

    def open(self) -> None:
        """Sets this process's options of the device's libraries."""

    def select(self) -> None:
        """Makes it the calling thread's current device. Each thread that uses an accelerator begins so."""

    def empty_cache(self) -> None:
        """Returns memory that torch keeps for reuse."""

    def copy_stream(self) -> CopyStream:
        """A new stream of copies."""
        return CopyStream()

    @property
    def processors(self) -> int:
        """Parts of the device that compute blocks of a kernel, independent of one another."""
        return 1

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor on the device, without waiting for the copy."""
        return tensor

    def lock_pages(self, address: int, nbytes: int) -> int:
        """Locks whole pages of host memory for copies to and from the device; 0, or the driver's error."""
        return 0

    def unlock_pages(self, address: int) -> int:
        """Unlocks it again."""
        return 0


class Accelerator(Device):
    """A device with memory of its own, by torch's module of that type. Without an index it is the first one.

    The modules have the same names: another accelerator sets `type`, and replaces what differs.
    """

    on_host = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.device(device.type, device.index or 0))

    @classmethod
    def available(cls) -> bool:
        return bool(torch.get_device_module(cls.type).is_available())

    @property
    def module(self) -> Any:
        """torch.cuda, or what is in its place."""
        return torch.get_device_module(self.type)

    @property
    def start_name(self) -> str:
        return f"{self.type}-{self.module.get_device_properties(self.torch).uuid}"

    def open(self) -> None:
        self.select()

    def select(self) -> None:
        # Else the driver opens a context on the first device, about 0.5 GB that no memory plan counts.
        self.module.set_device(self.torch)

    def empty_cache(self) -> None:
        self.module.empty_cache()

    def copy_stream(self) -> CopyStream:
        return DeviceStream(self)

    @property
    def processors(self) -> int:
        return int(self.module.get_device_properties(self.torch).multi_processor_count)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().pin_memory().to(self.torch, non_blocking=True)

    def event(self) -> Any:
        """A new event."""
        return self.module.Event()


class CudaDevice(Accelerator):
    """A CUDA device."""

    type = "cuda"
    captures = True
    collectives = "nccl"

    def open(self) -> None:
        # On Hopper torch prefers cuDNN's attention, which builds a plan for every new shape: 40 to 400 ms
        # each, in nearly every step.
        torch.backends.cuda.enable_cudnn_sdp(False)
        super().open()

    def event(self) -> Any:
        # By default a thread that waits keeps its core busy.
        return self.module.Event(blocking=True)

    def lock_pages(self, address: int, nbytes: int) -> int:
        self.select()
        return int(self.module.cudart().cudaHostRegister(address, nbytes, _PORTABLE))

    def unlock_pages(self, address: int) -> int:
        self.select()
        return int(self.module.cudart().cudaHostUnregister(address))


#: The devices that workers can use, by torch's type.
DEVICES: dict[str, type[Device]] = {kind.type: kind for kind in (Device, CudaDevice)}


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

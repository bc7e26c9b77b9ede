"""The devices that workers compute on: what differs between a CPU and an accelerator besides computing."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from triptych.base.machine.copy_stream import CopyStream, DeviceStream

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

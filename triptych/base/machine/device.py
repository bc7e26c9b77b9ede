"""The devices that workers compute on: what differs between a CPU and an accelerator besides computing."""

from __future__ import annotations

from typing import ClassVar

import torch


class Device:
    """A CPU, and the base of all other devices: device memory is host memory, and no call is asynchronous."""

    #: torch's type of device.
    type: ClassVar[str] = "cpu"

    def __init__(self, device: torch.device) -> None:
        self.torch = device

    @staticmethod
    def of(device: torch.device) -> Device:
        """The device of this name; KeyError for a type that workers do not serve."""
        return DEVICES[device.type](device)

    def open(self) -> None:
        """Sets this process's options of the device's libraries."""

    def select(self) -> None:
        """Makes it the calling thread's current device. Each thread that uses an accelerator begins so."""

    def empty_cache(self) -> None:
        """Returns memory that torch keeps for reuse."""


class CudaDevice(Device):
    """A CUDA device. A device without an index is the first."""

    type = "cuda"

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.device(device.type, device.index or 0))

    def open(self) -> None:
        # On Hopper torch prefers cuDNN's attention, which builds a plan for every new shape: 40 to 400 ms
        # each, in nearly every step.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.select()

    def select(self) -> None:
        # Without it the driver opens a context on the first GPU, about 0.5 GB that no memory plan counts.
        torch.cuda.set_device(self.torch)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()


#: The devices that workers can use, by torch's type.
DEVICES: dict[str, type[Device]] = {kind.type: kind for kind in (Device, CudaDevice)}

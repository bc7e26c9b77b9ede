"""torch.cuda without a GPU: its calls are recorded, with the thread that makes them."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch


@dataclass
class FakeCuda:
    """`calls` are (name, argument) in order; `selected` has each thread's current device, by its name."""

    calls: list[tuple[str, object]] = field(default_factory=list)
    selected: dict[str, str] = field(default_factory=dict)

    def select(self, device: torch.device) -> None:
        self.selected[threading.current_thread().name] = str(device)
        self.calls.append(("set_device", str(device)))

    @property
    def here(self) -> str | None:
        """The calling thread's current device; None where it has selected none."""
        return self.selected.get(threading.current_thread().name)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("cudaHostRegister", (address, nbytes, flags, self.here)))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("cudaHostUnregister", (address, self.here)))
        return 0


class FakeStream:
    """A stream whose work is done at once: "stream", or "model" for the current one."""

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.calls.append(("wait_stream", (self.name, other.name)))

    def synchronize(self) -> None:
        self.cuda.calls.append(("synchronize", self.cuda.here))


class FakeEvent:
    """An event, and the device that was current where it was waited for."""

    def __init__(self, cuda: FakeCuda, **options: object) -> None:
        self.cuda = cuda
        cuda.calls.append(("Event", options))

    def record(self, stream: FakeStream) -> None:
        self.cuda.calls.append(("record", stream.name))

    def synchronize(self) -> None:
        self.cuda.calls.append(("event.synchronize", self.cuda.here))


def fake_cuda(patch: pytest.MonkeyPatch) -> FakeCuda:
    """torch.cuda as it is on a machine with GPUs, for code that does not compute on them."""
    cuda = FakeCuda()
    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "set_device": cuda.select,
        "cudart": lambda: cuda,
        "current_device": lambda: 0,
        "Stream": lambda device: FakeStream(cuda, "stream"),
        "Event": lambda **options: FakeEvent(cuda, **options),
        "stream": nullcontext,
        "current_stream": lambda device: FakeStream(cuda, "model"),
    }
    for name, value in replaced.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(
        torch.backends.cuda, "enable_cudnn_sdp", lambda on: cuda.calls.append(("enable_cudnn_sdp", on))
    )
    return cuda

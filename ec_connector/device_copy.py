"""Copies between host and device beside the model's own work: a stream of their own, told by events."""

from __future__ import annotations

from collections.abc import Callable

import torch


class DeviceCopier:
    """On a CPU device nothing is copied: host and device memory are one."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.is_cuda = self.device.type == "cuda"
        if self.is_cuda and self.device.index is None:
            # A bare "cuda" is another device on every thread that has chosen one.
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self.device) if self.is_cuda else None  # type: ignore[no-untyped-call]

    def to_device(self, host: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
        """The tensor on the device, and what waits until it is whole (None: it is already).

        Called from the thread that runs the model. `host` must live until then.
        """
        if self._stream is None:
            return host, None
        with torch.cuda.stream(self._stream):
            copy = host.to(self.device, non_blocking=True)
        # The model's stream reads it: its memory must not be reused before that stream is done with it.
        copy.record_stream(torch.cuda.current_stream(self.device))
        return copy, self._recorded()

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
        """A contiguous host tensor, and what waits until it is whole (None: it is already)."""
        if self._stream is None:
            return tensor.detach().to("cpu").contiguous(), None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            whole = tensor.detach().contiguous()
            host = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True)
            host.copy_(whole, non_blocking=True)
        tensor.record_stream(self._stream)
        return host, self._recorded()

    def _recorded(self) -> Callable[[], None]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)

        def wait() -> None:
            event.synchronize()

        return wait

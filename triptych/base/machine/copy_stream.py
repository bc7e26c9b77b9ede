"""Streams of copies between a device and the host, beside the stream that the model computes in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from triptych.base.machine.device import Accelerator


class CopyStream:
    """The copies of a CPU: each has ended when its call returns, and nothing waits for them."""

    def beside_model(self) -> AbstractContextManager[object]:
        """Copies inside `with` run in this stream."""
        return nullcontext()

    def after_model(self) -> AbstractContextManager[object]:
        """As `beside_model`, once all work that the model has queued so far is done."""
        return nullcontext()

    def block_model(self) -> None:
        """What the model queues from now on waits for the copies so far."""

    def keep(self, tensor: torch.Tensor, *, model: bool = False) -> None:
        """Its memory, once freed, is not reused before these copies, or the `model`'s work, have ended."""

    def mark(self) -> Callable[[], None]:
        """A wait, for any thread, until the copies so far have ended; raises the error of one that failed."""
        return lambda: None

    def synchronize(self) -> None:
        """Waits for all copies; raises the error of one that failed."""


class DeviceStream(CopyStream):
    """A stream of an accelerator, by torch's module of that."""

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._stream: Any = device.module.Stream(device.torch)

    @property
    def _model(self) -> Any:
        return self._device.module.current_stream(self._device.torch)

    def beside_model(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = self._device.module.stream(self._stream)
        return context

    def after_model(self) -> AbstractContextManager[object]:
        self._stream.wait_stream(self._model)
        return self.beside_model()

    def block_model(self) -> None:
        self._model.wait_stream(self._stream)

    def keep(self, tensor: torch.Tensor, *, model: bool = False) -> None:
        tensor.record_stream(self._model if model else self._stream)

    def mark(self) -> Callable[[], None]:
        event = self._device.event()
        event.record(self._stream)

        def wait() -> None:
            self._device.select()
            event.synchronize()

        return wait

    def synchronize(self) -> None:
        self._device.select()
        self._stream.synchronize()

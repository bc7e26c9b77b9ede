"""Copies between host and device beside the model's work, in a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from triptych.base.machine.device import Device
from triptych.base.types import ItemPlan

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class DeviceCopier:
    """A copier of one device. On a CPU nothing is copied: host and device memory are one."""

    def __init__(self, device: str) -> None:
        self.device = Device.of(torch.device(device))
        self._stream = self.device.copy_stream()

    def to_device(
        self, pieces: Sequence[torch.Tensor], plan: ItemPlan
    ) -> tuple[torch.Tensor, Callable[[], None] | None]:
        """The item on the device, [rows, width], and a wait until it is whole (None: it is already).

        `pieces` hold its bytes, one after the other, and must live until then; one piece is not copied where
        it is on the device. Called from the thread that runs the model. MemoryError if the device has none.
        """
        if self.device.on_host:
            whole = pieces[0] if len(pieces) == 1 else torch.cat([*pieces, _NOTHING])
            return _shaped(whole, plan), None
        with self._stream.beside_model():
            try:
                copy = torch.empty(plan.nbytes, dtype=torch.uint8, device=self.device.torch)
            except torch.OutOfMemoryError as error:
                raise MemoryError(f"{self.device.torch} has no {plan.nbytes} bytes free") from error
            start = 0
            for piece in pieces:
                copy[start : start + piece.numel()].copy_(piece, non_blocking=True)
                start += piece.numel()
        # The model's stream reads it: its memory must not be reused before that stream is done with it.
        self._stream.keep(copy, model=True)
        return _shaped(copy, plan), self._stream.mark()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous host tensor; waits for a device's."""
        if self.device.on_host or tensor.device.type == "cpu":
            return tensor.detach().to("cpu").contiguous()
        with self._stream.after_model():
            host = tensor.detach().contiguous().to("cpu")
        self._stream.keep(tensor)
        return host

    def drain(self) -> None:
        """Waits for all copies."""
        self._stream.synchronize()


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _shaped(whole: torch.Tensor, plan: ItemPlan) -> torch.Tensor:
    return whole.view(DTYPES[plan.dtype]).view(plan.rows, plan.width)

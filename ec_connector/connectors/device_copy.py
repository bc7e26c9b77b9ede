"""Copies between host and device beside the model's work, on a CUDA stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from triptych.base.types import ItemPlan

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class DeviceCopier:
    """A copier with a CUDA stream. On a CPU nothing is copied: host and device memory are one."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.is_cuda = self.device.type == "cuda"
        if self.is_cuda and self.device.index is None:
            # A bare "cuda" is another device on every thread that has chosen one.
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self.device) if self.is_cuda else None

    def to_device(
        self, pieces: Sequence[torch.Tensor], plan: ItemPlan
    ) -> tuple[torch.Tensor, Callable[[], None] | None]:
        """The item on the device, [rows, width], and a wait until it is whole (None: it is already).

        `pieces` hold its bytes, one after the other, and must live until then; one piece is not copied where
        it is on the device. Called from the thread that runs the model.
        """
        if self._stream is None:
            whole = pieces[0] if len(pieces) == 1 else torch.cat([*pieces, _NOTHING])
            return _shaped(whole, plan), None
        with torch.cuda.stream(self._stream):
            copy = torch.empty(plan.nbytes, dtype=torch.uint8, device=self.device)
            start = 0
            for piece in pieces:
                copy[start : start + piece.numel()].copy_(piece, non_blocking=True)
                start += piece.numel()
        # The model's stream reads it: its memory must not be reused before that stream is done with it.
        copy.record_stream(torch.cuda.current_stream(self.device))
        return _shaped(copy, plan), self._recorded()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous host tensor; waits for a device's."""
        if self._stream is None or tensor.device.type == "cpu":
            return tensor.detach().to("cpu").contiguous()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            host = tensor.detach().contiguous().to("cpu")
        tensor.record_stream(self._stream)
        return host

    def drain(self) -> None:
        """Waits for all copies."""
        if self._stream is not None:
            self._stream.synchronize()

    def _recorded(self) -> Callable[[], None]:
        event = torch.cuda.Event()
        event.record(self._stream)

        def wait() -> None:
            event.synchronize()

        return wait


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _shaped(whole: torch.Tensor, plan: ItemPlan) -> torch.Tensor:
    return whole.view(DTYPES[plan.dtype]).view(plan.rows, plan.width)

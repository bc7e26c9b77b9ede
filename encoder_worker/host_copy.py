"""Tower outputs to host memory, on a stream of their own where there is one."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class HostCopy:
    """Called with the outputs of a batch, returns them on the host, contiguous and complete.

    On CUDA the copies go to pinned buffers on their own stream, so that they do not queue behind other
    work of the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self._stream is None:
            return [output.detach().contiguous() for output in outputs]
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        copies = []
        with torch.cuda.stream(self._stream):
            for output in outputs:
                copy = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
                copy.copy_(output, non_blocking=True)
                output.record_stream(self._stream)
                copies.append(copy)
        self._stream.synchronize()
        return copies

"""Copies of tower outputs to host memory; on CUDA on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from triptych.base.machine.device_memory import host_empty
from triptych.ec_connector.connectors.host_buffers import PinnedMemory

#: Bytes of page-locked memory that outputs pass through.
_STAGING_BYTES = 32 << 20


class HostCopier:
    """Copies the outputs of a batch to the host, contiguous and complete.

    On CUDA they pass through one page-locked buffer, taken at start, on a stream of their own, so that they
    do not queue behind other work of the device; the results are ordinary memory of exactly their size.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._staging = PinnedMemory(_STAGING_BYTES, lock=True)

    def __call__(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self._stream is None:
            return [output.detach().contiguous() for output in outputs]
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        # Other ranks' outputs come on the host.
        on_device = [output for output in outputs if output.is_cuda]
        with torch.cuda.stream(self._stream):
            copies = iter(staged(on_device, self._staging.bytes, self._stream.synchronize))
        for output in on_device:
            output.record_stream(self._stream)
        return [next(copies) if output.is_cuda else output.contiguous() for output in outputs]


def staged(
    outputs: Sequence[torch.Tensor], staging: torch.Tensor, wait: Callable[[], None]
) -> list[torch.Tensor]:
    """Contiguous host copies of `outputs`, through `staging` (uint8); `wait` ends the copies so far."""
    hosts = [host_empty(output.shape, output.dtype) for output in outputs]
    filled, batch = 0, list[tuple[torch.Tensor, torch.Tensor]]()

    def empty() -> None:
        nonlocal filled
        wait()
        for host, part in batch:
            host.copy_(part)
        batch.clear()
        filled = 0

    for output, host in zip(outputs, hosts, strict=True):
        source, target = _bytes_of(output.detach().contiguous()), _bytes_of(host)
        for start, stop in _stretches(len(source), filled, len(staging)):
            if filled + stop - start > len(staging):
                empty()
            part = staging[filled : filled + stop - start]
            part.copy_(source[start:stop], non_blocking=True)
            batch.append((target[start:stop], part))
            filled += stop - start
    empty()
    return hosts


def _stretches(nbytes: int, filled: int, size: int) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) that split `nbytes`: the first fills a buffer of `size`, others have its size."""
    start, room = 0, size - filled or size
    while start < nbytes:
        stop = min(nbytes, start + room)
        yield start, stop
        start, room = stop, size


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)

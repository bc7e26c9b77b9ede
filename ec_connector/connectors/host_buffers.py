"""Host memory of the worker role: a byte budget, buffers for embeddings, and copies to the device.

An item takes `ItemPlan.nbytes` here, exactly what admission and the encoder cache count for it: no header and
no rounding, so that items that add up to the limit fit together.
"""

from __future__ import annotations

import asyncio
import bisect
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.base.machine.device import Device
from triptych.base.types import ItemPlan

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}


class DeviceCopier:
    """A copier of one device. On a CPU nothing is copied: host and device memory are one."""

    def __init__(self, device: str) -> None:
        self.device = Device.of(torch.device(device))
        self._stream = self.device.copy_stream()

    def to_device(
        self, pieces: Sequence[torch.Tensor], plan: ItemPlan
    ) -> tuple[torch.Tensor, Callable[[], None] | None]:
        """The item on the device, [rows, columns], and a wait until it is whole (None: it is already).

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
    return whole.view(DTYPES[plan.dtype]).view(plan.rows, plan.columns)


class PinnedMemory:
    """`nbytes` of host memory in pages of its own, locked for copies to `device` until `close`.

    Locking stalls a whole GPU for milliseconds, and torch's pinned allocator does so for every new size: this
    memory is locked once, at start. A page that two buffers share could not be locked twice.
    """

    def __init__(self, nbytes: int, device: Device | None = None) -> None:
        """Without a `device`, and on a CPU, nothing is locked."""
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._unlock: Callable[[], object] = lambda: None
        if not nbytes:
            return
        length = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = torch.frombuffer(pages, dtype=torch.uint8, count=nbytes)
        if device is None or device.on_host:
            return
        if status := device.lock_pages(self.bytes.data_ptr(), length):
            raise RuntimeError(
                f"{nbytes} bytes of host memory cannot be page-locked (error {status} of {device.torch}): "
                "lower --encoder-cache-memory or --swap-memory"
            )
        # Unlocked before it is freed, even without `close`; not needed when the process exits.
        unlock = weakref.finalize(self, _unlock, device, self.bytes)
        unlock.atexit = False
        self._unlock = unlock

    def close(self) -> None:
        """Unlocks the pages; no copy may be running. Idempotent."""
        self._unlock()


def _unlock(device: Device, memory: torch.Tensor) -> None:
    if status := device.unlock_pages(memory.data_ptr()):
        raise RuntimeError(f"host memory cannot be unlocked (error {status} of {device.torch})")


class PinnedPool:
    """An allocator over one memory. Allocations may be in several pieces, so that all free bytes serve."""

    def __init__(self, memory: PinnedMemory) -> None:
        self._memory = memory
        #: (start, stop) of the free ranges, in order; adjacent ones are merged.
        self._free = [(0, memory.bytes.numel())] if memory.bytes.numel() else []

    @property
    def num_free(self) -> int:
        """Free bytes."""
        return sum(stop - start for start, stop in self._free)

    def allocate(self, nbytes: int) -> list[torch.Tensor]:
        """`nbytes`, in one piece if a free range is long enough, else in several. MemoryError if too few."""
        if nbytes > self.num_free:
            raise MemoryError(f"{nbytes} bytes of pinned memory were asked for, {self.num_free} are free")
        fitting = [stretch for stretch in self._free if stretch[1] - stretch[0] >= nbytes]
        if fitting:
            return [self._cut(min(fitting, key=_length), nbytes)] if nbytes else []
        pieces = []
        while nbytes:
            longest = max(self._free, key=_length)
            pieces.append(self._cut(longest, min(nbytes, _length(longest))))
            nbytes -= pieces[-1].numel()
        return pieces

    def _cut(self, stretch: tuple[int, int], nbytes: int) -> torch.Tensor:
        index = self._free.index(stretch)
        start, stop = stretch
        self._free[index : index + 1] = [(start + nbytes, stop)] if start + nbytes < stop else []
        return self._memory.bytes[start : start + nbytes]

    def free(self, pieces: Sequence[torch.Tensor]) -> None:
        """Frees pieces from `allocate`."""
        for piece in pieces:
            start = piece.data_ptr() - self._memory.bytes.data_ptr()
            self._join(start, start + piece.numel())

    def _join(self, start: int, stop: int) -> None:
        index = bisect.bisect(self._free, (start, stop))
        if index < len(self._free) and self._free[index][0] == stop:
            stop = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, stop))

    def close(self) -> None:
        """Closes the memory; no copy may be running. Idempotent."""
        self._memory.close()


def _length(stretch: tuple[int, int]) -> int:
    return stretch[1] - stretch[0]


class HostBudget:
    """A byte budget for host copies, granted in order of arrival. Belongs to one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, nbytes: int) -> None:
        """Waits until there is room; a caller that is cancelled leaves the queue."""
        if not self._waiting and self.used + nbytes <= self.limit:
            self.used += nbytes
            return
        granted = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():
                self.used -= nbytes
            self._grant()
            raise

    def release(self, nbytes: int) -> None:
        """Returns bytes that were acquired."""
        self.used -= nbytes
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            nbytes, granted = self._waiting[0]
            if granted.cancelled():
                self._waiting.popleft()
            elif self.used + nbytes <= self.limit:
                self._waiting.popleft()
                self.used += nbytes
                granted.set_result(None)
            else:
                return


class HostBuffer:
    """Memory for one item: uint8 tensors that hold its bytes in sequence."""

    def __init__(self, pieces: Sequence[torch.Tensor]) -> None:
        self.pieces = pieces

    @property
    def nbytes(self) -> int:
        return sum(piece.numel() for piece in self.pieces)

    def views(self) -> list[memoryview]:
        """The same memory, piece by piece."""
        return [piece.numpy().data for piece in self.pieces]


class ReusedMemory:
    """An allocator of ordinary memory. What no tensor or view of one refers to any more is given out again.

    The first write of new pages costs a third of a copy. Views may outlive the buffer: on a CPU the encoder
    cache has one of the host copy. For one thread; memory comes back from any.
    """

    def __init__(self) -> None:
        self._free = deque[NDArray[np.uint8]]()

    def empty(self, nbytes: int, *, kept: int) -> torch.Tensor:
        """A tensor of uint8; afterwards at most `kept` bytes wait for reuse."""
        block: NDArray[np.uint8] | None = None
        for _ in range(len(self._free)):
            free = self._free.popleft()
            if block is None and nbytes <= len(free) <= 2 * nbytes:
                block = free
            elif len(free) <= kept:
                kept -= len(free)
                self._free.append(free)
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        if block is None:
            block = np.empty(nbytes, dtype=np.uint8)  # with huge pages, which torch does not ask for
        part = block[:nbytes]
        # The tensor's storage holds `part` alone, and frees it as the last.
        weakref.finalize(part, self._free.append, block).atexit = False
        return torch.from_numpy(part)


class HostMemory:
    """An allocator of buffers within `limit` bytes, for one event loop.

    Buffers come from the pool if there is one, else from ordinary memory in one piece, kept for reuse within
    the limit.
    """

    def __init__(self, limit: int, pool: PinnedPool | None = None) -> None:
        self._budget = HostBudget(limit)
        self._pool = pool
        self._plain = ReusedMemory()

    @property
    def limit(self) -> int:
        return self._budget.limit

    @property
    def used(self) -> int:
        return self._budget.used

    async def acquire(self, nbytes: int) -> HostBuffer:
        """Waits until there is room. MemoryError or RuntimeError when allocation fails."""
        await self._budget.acquire(nbytes)
        try:
            if self._pool is not None:
                return HostBuffer(self._pool.allocate(nbytes))
            return HostBuffer([self._plain.empty(nbytes, kept=self.limit - self.used)])
        except BaseException:
            self._budget.release(nbytes)
            raise

    def release(self, buffer: HostBuffer) -> None:
        """Frees a buffer that no transfer uses any more."""
        if self._pool is not None:
            self._pool.free(buffer.pieces)
        self._budget.release(buffer.nbytes)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data

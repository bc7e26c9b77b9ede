"""Pages of a KV cache on a CPU, taken from the system before blocks of other workers are written there.

A block has a part in each layer and head, all in pages of their own: where none was ever written, the
engine's thread would wait for the system to clear more memory than it copies, and every stream with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from triptych.base.config import format_size
from triptych.base.machine.pages import HUGE_PAGE, populate
from triptych.base.machine.resources import available_memory

logger = logging.getLogger(__name__)

#: This part of the memory that is available at the start is left to others.
_SPARE_PART = 8


def spans(pools: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Addresses and bytes of a cache's memory, that of the blocks that are used first before the others'."""
    rows = []
    for pool in pools:
        parts, blocks, size, heads, dim = pool.shape
        nbytes = blocks * size * dim * pool.element_size()
        rows += [(pool.data_ptr() + row * nbytes, nbytes) for row in range(parts * heads)]
    for begin in range(0, max((nbytes for _, nbytes in rows), default=0), HUGE_PAGE):
        for start, nbytes in rows:
            if begin < nbytes:
                yield start + begin, min(HUGE_PAGE, nbytes - begin)


class EarlyPages:
    """The thread that takes them, as long as the machine has memory; what it leaves is taken at first use."""

    def __init__(
        self, pools: Sequence[torch.Tensor], available: Callable[[], int] = available_memory
    ) -> None:
        # Held as long as the thread runs: the memory must not be given back under it.
        self._pools = pools
        self._available = available
        #: Bytes that are taken so far.
        self.taken = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="early pages", daemon=True)

    def start(self) -> None:
        """Begins. On other devices memory is there from the start."""
        if all(pool.device.type == "cpu" for pool in self._pools):
            self._thread.start()

    def wait(self) -> None:
        """Until all are taken, or none is taken any more."""
        if self._thread.ident is not None:
            self._thread.join()

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._closed.set()
        self.wait()

    def _run(self) -> None:
        begun = time.monotonic()
        spare = self._available() // _SPARE_PART
        for address, nbytes in spans(self._pools):
            if self._closed.is_set() or self._available() < spare + nbytes or not populate(address, nbytes):
                break
            self.taken += nbytes
        logger.info("took %s of KV cache early, in %.1f s", format_size(self.taken), time.monotonic() - begun)

"""Pages of a KV cache on a CPU, taken from the system before blocks are written there.

A block has a part in each layer and head, all in pages of their own, and new blocks come to the ends of all
these pages in the same step: the engine's thread would wait until the system has cleared a page for each, a
tenth of a second, and every stream with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import torch

from triptych.base.machine.pages import HUGE_PAGE, populate
from triptych.base.machine.resources import available_memory

logger = logging.getLogger(__name__)

#: This part of the memory that is available at the start is left to others.
_SPARE_PART = 8
#: The pause after each page, in times of what taking it took: the engine may run on the same core.
_PAUSES = 3.0


class CachePages:
    """The memory of a cache, by blocks. `pools` are as those of `PagedKVCache`."""

    def __init__(self, pools: Sequence[torch.Tensor]) -> None:
        # Held: the memory must not be given back while somebody has its addresses.
        self._pools = pools
        #: Address, and bytes of a block, of each row: the parts of all blocks in one layer and head.
        self._rows: list[tuple[int, int]] = []
        self.num_blocks = 0
        for pool in pools:
            parts, self.num_blocks, size, heads, dim = pool.shape
            nbytes = size * dim * pool.element_size()
            rows = range(parts * heads)
            self._rows += [(pool.data_ptr() + row * self.num_blocks * nbytes, nbytes) for row in rows]
        #: Blocks whose parts fill a huge page of the widest rows.
        self.unit = max(1, HUGE_PAGE // max((nbytes for _, nbytes in self._rows), default=HUGE_PAGE))

    def spans(self, first: int, last: int) -> list[tuple[int, int]]:
        """Addresses and bytes of the blocks [first, last), row by row."""
        last = min(last, self.num_blocks)
        return [(start + first * nbytes, (last - first) * nbytes) for start, nbytes in self._rows]


class EarlyPages:
    """The thread that takes them, for a huge page of blocks more in each row than have been used so far.

    As long as the machine has memory: what it leaves is taken at first use.
    """

    def __init__(
        self, pools: Sequence[torch.Tensor], available: Callable[[], int] = available_memory
    ) -> None:
        self._pages = CachePages(pools)
        self._available = available
        #: Blocks whose pages are taken.
        self.taken = 0
        self._reached = 0
        #: On other devices memory is there from the start.
        self._ended = any(pool.device.type != "cpu" for pool in pools)
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="early pages", daemon=True)

    def start(self) -> None:
        """Begins, where there is something to take."""
        if not self._ended:
            self._thread.start()

    def reach(self, blocks: int) -> None:
        """So many have been used so far, the first ones of the cache."""
        if blocks > self._reached:
            self._reached = blocks
            # Most steps reach new blocks, and few of them leave the thread something to do.
            if self._wanted():
                with self._changed:
                    self._changed.notify_all()

    def wait(self, seconds: float = 60.0) -> bool:
        """Whether, by then, all that are wanted are taken or none is taken any more."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended or not self._wanted(), seconds)

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def _wanted(self) -> bool:
        return self.taken < min(self._reached + self._pages.unit, self._pages.num_blocks)

    def _run(self) -> None:
        try:
            self._take_wanted()
        except OSError:
            logger.exception("no more pages of the KV cache are taken before their first use")
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _take_wanted(self) -> None:
        spare = self._available() // _SPARE_PART
        while self.taken < self._pages.num_blocks:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._wanted())
            if self._ended or not self._take(spare):
                break
            with self._changed:
                self.taken = min(self.taken + self._pages.unit, self._pages.num_blocks)
                self._changed.notify_all()

    def _take(self, spare: int) -> bool:
        """The next ones; False where the system gives none, or too little is left for others."""
        for address, nbytes in self._pages.spans(self.taken, self.taken + self._pages.unit):
            begun = time.monotonic()
            if self._ended:
                return False
            if self._available() < spare + nbytes or not populate(address, nbytes):
                logger.info("blocks of KV cache from the %dth on have their pages at first use", self.taken)
                return False
            time.sleep(_PAUSES * (time.monotonic() - begun))
        return True

"""Takes preempted requests out to host memory and back, with the cross table of the last who used it."""

from __future__ import annotations

from triptych.pd_worker.core.items import ItemTracker
from triptych.pd_worker.core.kv_cache.manager import KVCacheManager
from triptych.pd_worker.core.kv_cache.swap_manager import SwapManager
from triptych.pd_worker.core.outputs import SchedulerOutput
from triptych.pd_worker.core.request import RequestState


class Swapper:
    """Writes the copies into the step's work. Without a SwapManager every preempted request is recomputed."""

    def __init__(self, kv: KVCacheManager, items: ItemTracker, swap: SwapManager | None) -> None:
        self._kv = kv
        self._items = items
        self._swap = swap

    def tokens(self, state: RequestState) -> int:
        """How many of the request's tokens are in host memory."""
        return 0 if self._swap is None else self._swap.tokens(state.request_id)

    def is_leaving(self, state: RequestState) -> bool:
        """The request, or its cross table, is on its way to host memory and cannot come back in this step."""
        return self._swap is not None and (
            self._swap.is_leaving(state.request_id) or self._items.table_is_leaving(state)
        )

    def end_out(self, *, written: bool) -> list[str]:
        """The step is over; the requests (their ids inside this worker) whose copies have failed."""
        if self._swap is None:
            return []
        if not written:
            return self._swap.fail()
        self._swap.commit()
        return []

    def take_out(self, state: RequestState, output: SchedulerOutput) -> bool:
        """Copies what is computed of a request that still has its blocks; False: it is computed again."""
        count = state.num_computed_tokens
        if self._swap is None or count == 0:
            return False
        blocks = self._kv.table(state.request_id)[: self._kv.blocks_for(count)]
        feature = state.request.cross
        table: tuple[int, ...] = ()
        if feature is not None and self._items.cross is not None:
            table = self._items.cross.last_held(state.request_id)
        plan = feature.plan if feature is not None and table else None
        copies = self._swap.out(state.request_id, blocks, count, plan, table)
        if copies is None:
            return False
        output.swap_out += copies
        return True

    def bring_back(self, state: RequestState, output: SchedulerOutput) -> int:
        """Copies the request's tokens into the blocks that it has got; how many they are."""
        count = self.tokens(state)
        if self._swap is not None and count:
            output.swap_in += self._swap.back(state.request_id, self._kv.table(state.request_id))
        return count

    def free(self, state: RequestState) -> None:
        """Idempotent."""
        if self._swap is not None:
            self._swap.free(state.request_id)

"""Cross-attention tables: the projected keys and values of encoder outputs, shared by mm_hash.

Their blocks come from the pool of the requests' own tables.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from blake3 import blake3

from triptych.base.types import ItemPlan
from triptych.pd_worker.core.items.item import CrossTable, ItemState
from triptych.pd_worker.core.kv_cache.block_pool import BlockPool, plan_identity
from triptych.pd_worker.core.kv_cache.kv_cache_manager import BlockCopy, SwapManager


class TableState(enum.Enum):
    """The state of an item's cross table."""

    #: There is none: the embedding has to be projected first.
    ABSENT = enum.auto()
    #: Its blocks are allocated, its projection is part of the current step.
    PENDING = enum.auto()
    #: Written, and read-only.
    READY = enum.auto()
    #: A copy is in host memory.
    SWAPPED = enum.auto()
    #: It is being copied to host memory and cannot be read in this step.
    LEAVING = enum.auto()


class CrossKVManager:
    """ABSENT --begin--> PENDING --commit--> READY; `fail` takes PENDING back; SWAPPED --restore--> READY.

    A restored table is READY for the step that restores it, and taken back by `fail` if its copies fail.

    A table is reference-counted by requests. With the last reference its blocks are free, and the table can
    be found until the first of them is allocated for something else.
    """

    def __init__(self, pool: BlockPool, block_size: int, swap: SwapManager | None = None) -> None:
        self._pool = pool
        self._swap = swap or SwapManager(0)
        self._block_size = block_size
        #: Their records have the tables.
        self.items = self._swap.items
        #: The item on whose table each request has a reference.
        self._held: dict[str, ItemState] = {}

    def reset(self) -> None:
        """Forgets all tables; their blocks are the pool's to reset."""
        for item in self._held.values():
            item.table = None
            self.items.drop_unused(item)
        self._held.clear()

    @property
    def num_tables(self) -> int:
        """Tables with references."""
        return len(set(self._held.values()))

    def blocks_for(self, plan: ItemPlan) -> int:
        return -(-plan.rows // self._block_size)

    def plan_of(self, mm_hash: str) -> ItemPlan | None:
        """The plan of a table in use."""
        table = self.items.get(mm_hash).table
        return None if table is None else table.plan

    def state(self, plan: ItemPlan) -> TableState:
        """The state of the item's table; takes no reference."""
        table = self.items.get(plan.mm_hash).table
        if table is not None:
            return TableState.READY if table.ready else TableState.PENDING
        # Blocks are freed, and so evicted, last one first: while that one is cached, all are.
        last = self._pool.find(_digest(plan_identity(plan), self.blocks_for(plan) - 1))
        if last is not None:
            return TableState.READY
        if not self._swap.has_table(plan):
            return TableState.ABSENT
        return TableState.SWAPPED if self._swap.table_is_written(plan) else TableState.LEAVING

    def acquire(self, request_id: str, plan: ItemPlan) -> bool:
        """Takes a reference to a READY or PENDING table; False, and nothing changed, when it is neither."""
        table = self.items.get(plan.mm_hash).table
        if table is None:
            blocks = self._find(plan)
            if blocks is None:
                return False
            for block in blocks:
                self._pool.add_reference(block)
            table = CrossTable(plan, blocks, ready=True, labelled=True)
        self._hold(request_id, table)
        return True

    def begin(self, request_id: str, plan: ItemPlan) -> tuple[int, ...]:
        """ABSENT to PENDING: the blocks to project into. The caller has made sure that there are enough."""
        return self._begin(request_id, plan, ready=False)

    def restore(self, request_id: str, plan: ItemPlan) -> list[BlockCopy]:
        """SWAPPED to READY: the copies that write it, which the step makes before anything is computed."""
        return self._swap.restore_table(plan.mm_hash, self._begin(request_id, plan, ready=True))

    def last_held(self, request_id: str) -> tuple[int, ...]:
        """The READY table that only this request has a reference to; else empty."""
        item = self._held.get(request_id)
        alone = item is not None and item.table is not None and item.table.holders == {request_id}
        return self.table(request_id) if alone else ()

    def commit(self, mm_hash: str) -> None:
        """The projection, or the copy, is written: READY, and findable from now on."""
        table = self.items.get(mm_hash).table
        if table is None or table.labelled:
            return
        table.ready = table.labelled = True
        identity = plan_identity(table.plan)
        for index, block in enumerate(table.blocks):
            self._pool.relabel(block, _digest(identity, index))

    def fail(self, mm_hashes: Iterable[str]) -> None:
        """Projections, or copies, have failed: ABSENT, and all references are dropped."""
        for mm_hash in mm_hashes:
            if (table := self.items.get(mm_hash).table) is not None and not table.labelled:
                for request_id in list(table.holders):
                    self.release(request_id)

    def table(self, request_id: str) -> tuple[int, ...]:
        """The blocks of the request's READY table, in the order of rows; else empty."""
        item = self._held.get(request_id)
        table = None if item is None else item.table
        return table.blocks if table is not None and table.ready else ()

    def release(self, request_id: str) -> None:
        """Drops the request's reference. Idempotent."""
        item = self._held.pop(request_id, None)
        if item is None or (table := item.table) is None:
            return
        table.holders.discard(request_id)
        if not table.holders:
            item.table = None
            self.items.drop_unused(item)
            self._pool.release(reversed(table.blocks))

    def _begin(self, request_id: str, plan: ItemPlan, *, ready: bool) -> tuple[int, ...]:
        assert self.items.get(plan.mm_hash).table is None, "a table is projected once"
        blocks = tuple(self._pool.allocate(self.blocks_for(plan)))
        self._hold(request_id, CrossTable(plan, blocks, ready))
        return blocks

    def _hold(self, request_id: str, table: CrossTable) -> None:
        item = self._held[request_id] = self.items.add(table.plan.mm_hash)
        item.table = table
        table.holders.add(request_id)

    def _find(self, plan: ItemPlan) -> tuple[int, ...] | None:
        identity = plan_identity(plan)
        blocks = []
        # In the order of eviction: the first block to be evicted is looked up first.
        for index in reversed(range(self.blocks_for(plan))):
            block = self._pool.find(_digest(identity, index))
            if block is None:
                return None
            blocks.append(block)
        return tuple(reversed(blocks))


def _digest(identity: bytes, index: int) -> bytes:
    """The content of one block of a table; differs from that of any block of a prefix."""
    return blake3(b"cross" + index.to_bytes(8, "little") + identity).digest()

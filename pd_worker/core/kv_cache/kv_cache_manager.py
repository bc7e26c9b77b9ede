"""Block tables of requests, the prefix cache of full blocks, and host blocks of swapped requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from triptych.base.types import ItemPlan
from triptych.pd_worker.core.items.item import ItemTable, SwappedTable
from triptych.pd_worker.core.kv_cache.block_pool import BlockPool, PrefixChain
from triptych.pd_worker.core.kv_cache.state_slots import StateSlots, boundaries_of


@dataclass(slots=True)
class _BlockTable:
    blocks: list[int] = field(default_factory=list)
    #: Blocks at the front of the table that are in the prefix cache.
    registered: int = 0


#: Blocks that are looked up before more digests are made.
_LOOKED_UP = 64


class KVCacheManager:
    """Allocates the requests' block tables: blocks of `block_size` tokens from a pool of `num_blocks`.

    With `states` a request has a state slot beside its blocks, both or none, and a cached prefix ends where
    there is a snapshot of the state.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        states: StateSlots | None = None,
    ) -> None:
        """`states` None: the model has no recurrent layers."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks)
        self.states = states
        self._tables: dict[str, _BlockTable] = {}

    @property
    def num_free(self) -> int:
        """Blocks without references."""
        return self.pool.num_free

    @property
    def num_used(self) -> int:
        return self.pool.num_used

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def table(self, request_id: str) -> list[int]:
        """The request's blocks, in token order; empty when it holds none."""
        table = self._tables.get(request_id)
        return table.blocks if table else []

    def slot(self, request_id: str) -> int:
        """The request's state slot, of a model with recurrent layers."""
        assert self.states is not None
        return self.states.slot(request_id)

    def begin_step(self) -> None:
        """Snapshots that the last step was to write and did not are given up."""
        if self.states is not None:
            self.states.end_step()

    def find_prefix(self, chain: PrefixChain, num_tokens: int) -> list[int]:
        """Blocks that hold the first full blocks of `chain`, never all of `num_tokens`.

        The last token has to be computed: its hidden state gives the next one.
        """
        blocks = self._find_blocks(chain, num_tokens)
        if self.states is not None:
            del blocks[self.states.longest(chain.digests(len(blocks))) :]
        return blocks

    def _find_blocks(self, chain: PrefixChain, num_tokens: int) -> list[int]:
        blocks: list[int] = []
        if not self.prefix_caching:
            return blocks
        last = (num_tokens - 1) // self.block_size
        # Piece by piece: of a long prompt that is not cached, digests are made as it is computed.
        for first in range(0, last, _LOOKED_UP):
            for digest in chain.digests(min(first + _LOOKED_UP, last), first):
                block = self.pool.find(digest)
                if block is None:
                    return blocks
                blocks.append(block)
        return blocks

    def prefix_digests(self, chain: PrefixChain, prefix: list[int], num_tokens: int) -> list[bytes]:
        """The digests of what `find_prefix` has found, and the first one that it has not found."""
        if not self.prefix_caching:
            return []
        if self.states is not None:
            # A snapshot of any of the blocks beyond the prefix would make it longer.
            prefix = self._find_blocks(chain, num_tokens)
        return chain.digests(min(len(prefix) + 1, (num_tokens - 1) // self.block_size))

    def boundaries(
        self,
        chain: PrefixChain,
        num_prompt: int,
        num_tokens: int,
        computed: int,
        item_ends: Sequence[int] = (),
    ) -> Sequence[int]:
        """Where the state of a prompt is kept, of a request with `computed` of its `num_tokens` tokens.

        Its items end at `item_ends` tokens.
        """
        if self.states is None or not self.states.num_snapshots:
            return ()
        shared = len(self._find_blocks(chain, num_tokens)) * self.block_size
        keeps_end = self.states.keeps_end
        return boundaries_of(num_prompt, self.block_size, computed, shared, item_ends, keeps_end=keeps_end)

    def allocate(
        self,
        request_id: str,
        prefix: list[int],
        num_tokens: int,
        *,
        spare: int = 0,
        keep_at: Sequence[int] = (),
    ) -> bool:
        """Allocates `prefix` and new blocks for the rest of `num_tokens` to a request without a table.

        With recurrent layers also a state slot; its state is kept at `keep_at` tokens. False, and nothing
        changed, when there is none, or fewer than `spare` blocks would be left.
        """
        assert request_id not in self._tables, "a request starts with an empty table"
        new = self.blocks_for(num_tokens) - len(prefix)
        revived = sum(1 for block in prefix if self.pool.is_free(block))
        if new + revived + spare > self.pool.num_free:
            return False
        if self.states is not None and not self.states.acquire(request_id, keep_at):
            return False
        for block in prefix:
            self.pool.add_reference(block)
        added = self.pool.allocate(new)
        self._tables[request_id] = _BlockTable(prefix + added, registered=len(prefix))
        return True

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Adds blocks until `num_tokens` fit; False, and nothing changed, when there are too few."""
        table = self._tables[request_id]
        new = self.blocks_for(num_tokens) - len(table.blocks)
        if new <= 0:
            return True
        if new > self.pool.num_free:
            return False
        table.blocks += self.pool.allocate(new)
        return True

    def register(
        self, request_id: str, chain: PrefixChain, num_computed_tokens: int, kept_at: Sequence[int] = ()
    ) -> None:
        """Makes the request's full blocks findable, once their keys and values are written.

        With the snapshots that were begun and written at `kept_at` tokens.
        """
        if not self.prefix_caching:
            return
        table = self._tables[request_id]
        full = num_computed_tokens // self.block_size
        if self.states is not None:
            for at in kept_at:
                self.states.commit(chain.digests(at // self.block_size)[-1])
        if full <= table.registered:
            return
        first = table.registered
        self.pool.label(table.blocks[first:full], chain.digests(full, first))
        table.registered = full

    def drain_changes(self) -> set[bytes]:
        """Digests of blocks, or of their snapshots, that were cached or evicted since the last call."""
        changes = self.pool.drain_changes()
        if self.states is not None:
            self.states.drop(digest for digest in changes if self.pool.find(digest) is None)
            changes |= self.states.drain_changes()
        return changes

    def reset(self) -> None:
        """Frees all tables, blocks and slots, and empties the prefix cache."""
        self._tables.clear()
        self.pool.reset()
        if self.states is not None:
            self.states.reset()

    def free(self, request_id: str) -> None:
        """Releases the request's blocks and its state slot. Idempotent."""
        if self.states is not None:
            self.states.release(request_id)
        table = self._tables.pop(request_id, None)
        if table is None:
            return
        # The end of a prefix is evicted first: a chain without its head is of no use.
        self.pool.release(reversed(table.blocks))


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy of one block, all layers, between the KV cache and host memory."""

    source: int
    target: int


@dataclass(slots=True)
class _Swapped:
    """A request's own blocks; they hold its first `num_tokens` tokens.

    The cross table that was swapped with it goes when the request is restored, or ends.
    """

    blocks: tuple[int, ...]
    num_tokens: int
    table: SwappedTable | None = None
    #: The host slot of the state of its recurrent layers.
    slot: int | None = None
    #: Its copy is confirmed; the blocks may not be read before that.
    written: bool = False


class SwapManager:
    """Allocates `num_blocks` host blocks to swapped requests. With 0 nothing is ever swapped.

    Of a model with recurrent layers each takes one of `num_slots` host slots, too; None: it has none.

    ABSENT --swap_out--> LEAVING --commit--> SWAPPED --swap_in--> ABSENT; `fail` takes LEAVING back.
    """

    def __init__(self, num_blocks: int, num_slots: int | None = None) -> None:
        self.num_blocks = num_blocks
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots or 0))
        #: Their records have the swapped cross tables.
        self.items = ItemTable()
        self._free = list(range(num_blocks))
        self._requests: dict[str, _Swapped] = {}
        #: Requests whose copies are part of the current step.
        self._leaving: list[str] = []

    def reset(self) -> None:
        """Frees all host blocks."""
        for request_id in list(self._requests):
            self.free(request_id)
        self._leaving.clear()
        self._free = list(range(self.num_blocks))
        self._free_slots = list(range(self._num_slots or 0))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def tokens(self, request_id: str) -> int:
        """How many tokens of the request are swapped, or being swapped."""
        swapped = self._requests.get(request_id)
        return 0 if swapped is None else swapped.num_tokens

    def slot(self, request_id: str) -> int | None:
        """The host slot of a swapped request's state."""
        swapped = self._requests.get(request_id)
        return None if swapped is None else swapped.slot

    def is_leaving(self, request_id: str) -> bool:
        """The request's copies are not confirmed yet."""
        swapped = self._requests.get(request_id)
        return swapped is not None and not swapped.written

    def has_table(self, plan: ItemPlan) -> bool:
        """The item's cross table is swapped, or being swapped."""
        return (table := self.items.get(plan.mm_hash).swapped) is not None and table.plan == plan

    def table_is_written(self, plan: ItemPlan) -> bool:
        """The copy of the item's cross table is confirmed."""
        table = self.items.get(plan.mm_hash).swapped
        return table is not None and table.plan == plan and table.written

    def commit(self) -> None:
        """The step's copies are complete: they may be read."""
        for request_id in self._leaving:
            if (swapped := self._requests.get(request_id)) is not None:
                swapped.written = True
                if swapped.table is not None:
                    swapped.table.written = True
        self._leaving.clear()

    def fail(self) -> list[str]:
        """The step's copies have failed; the ids of the requests that could not be swapped."""
        lost = [request_id for request_id in self._leaving if request_id in self._requests]
        for request_id in lost:
            self.free(request_id)
        self._leaving.clear()
        return lost

    def swap_out(
        self,
        request_id: str,
        blocks: Sequence[int],
        num_tokens: int,
        plan: ItemPlan | None = None,
        table: Sequence[int] = (),
    ) -> list[BlockCopy] | None:
        """The copies that swap a request out, and with it the cross table of `plan`.

        None, and nothing changed, where there is too little room or nothing to copy.
        """
        assert request_id not in self._requests, "a request is swapped out once"
        if plan is not None and self.items.get(plan.mm_hash).swapped is not None:
            table = ()
        if not blocks or len(blocks) + len(table) > len(self._free):
            return None
        if self._num_slots is not None and not self._free_slots:
            return None
        copies = [BlockCopy(block, self._free.pop()) for block in (*blocks, *table)]
        targets = tuple(copy.target for copy in copies)
        swapped = self._requests[request_id] = _Swapped(targets[: len(blocks)], num_tokens)
        if self._free_slots:
            swapped.slot = self._free_slots.pop()
        self._leaving.append(request_id)
        if plan is not None and table:
            swapped.table = SwappedTable(plan, targets[len(blocks) :])
            self.items.add(plan.mm_hash).swapped = swapped.table
        return copies

    def swap_in(self, request_id: str, blocks: Sequence[int]) -> list[BlockCopy]:
        """The copies of the request's tokens to the first of `blocks`; its host blocks are free.

        There are none for a request that is not swapped.
        """
        swapped = self._requests.get(request_id)
        if swapped is None:
            return []
        assert swapped.written, "only confirmed copies are read"
        self.free(request_id)
        return [BlockCopy(block, target) for block, target in zip(swapped.blocks, blocks, strict=False)]

    def restore_table(self, mm_hash: str, blocks: Sequence[int]) -> list[BlockCopy]:
        """The copies of a cross table to `blocks`; its host blocks are free."""
        table = self.items.get(mm_hash).swapped
        assert table is not None and table.written, "only confirmed copies are read"
        self._drop(table)
        return [BlockCopy(block, target) for block, target in zip(table.blocks, blocks, strict=True)]

    def free(self, request_id: str) -> None:
        """Frees the host blocks of the request and of the cross table swapped with it. Idempotent."""
        swapped = self._requests.pop(request_id, None)
        if swapped is not None:
            self._free.extend(swapped.blocks)
            if swapped.slot is not None:
                self._free_slots.append(swapped.slot)
            if swapped.table is not None:
                self._drop(swapped.table)

    def _drop(self, table: SwappedTable) -> None:
        item = self.items.get(table.plan.mm_hash)
        # It may be restored already, and another request swapped with the item's table since.
        if item.swapped is table:
            item.swapped = None
            self.items.drop_unused(item)
            self._free.extend(table.blocks)

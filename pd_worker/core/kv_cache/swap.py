"""Host blocks for the keys and values of swapped requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.base.types import ItemPlan
from triptych.pd_worker.core.items.item import ItemTable, SwappedTable


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

"""Blocks of host memory that preempted requests' keys and values wait in. Pure decisions, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.pd_worker.core.outputs import BlockCopy
from triptych.types import ItemPlan


@dataclass(slots=True)
class _Swapped:
    """A request's own blocks; they hold its first `num_tokens` tokens."""

    blocks: tuple[int, ...]
    num_tokens: int
    #: Its copy is confirmed; before that nobody may read the blocks.
    written: bool = False


@dataclass(slots=True)
class _SwappedTable:
    """A cross table; it goes when the request that brought it comes in, or ends."""

    plan: ItemPlan
    blocks: tuple[int, ...]
    request_id: str
    written: bool = False


class SwapManager:
    """`num_blocks` host blocks. What goes out is its request's, and ends with it or when it comes in.

    ABSENT --out--> on its way --commit--> here --back--> ABSENT; `fail` takes what is on its way back.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.reset()

    def reset(self) -> None:
        """Frees all host blocks and forgets what is in them."""
        self._free = list(range(self.num_blocks))
        self._requests: dict[str, _Swapped] = {}
        self._tables: dict[str, _SwappedTable] = {}
        #: The cross table that a request has brought here.
        self._brought: dict[str, str] = {}
        #: Requests whose copies are in the step's work.
        self._leaving: list[str] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def tokens(self, request_id: str) -> int:
        """How many tokens of the request are here, or on their way."""
        swapped = self._requests.get(request_id)
        return 0 if swapped is None else swapped.num_tokens

    def is_leaving(self, request_id: str) -> bool:
        """The request is on its way here: its copies are not confirmed yet."""
        swapped = self._requests.get(request_id)
        return swapped is not None and not swapped.written

    def has_table(self, plan: ItemPlan) -> bool:
        """A copy of the item's cross table is here, or on its way."""
        table = self._tables.get(plan.mm_hash)
        return table is not None and table.plan == plan

    def table_is_written(self, plan: ItemPlan) -> bool:
        """The copy of the item's cross table may be read."""
        return self.has_table(plan) and self._tables[plan.mm_hash].written

    def commit(self) -> None:
        """The step's copies are whole: they may be read."""
        for request_id in self._leaving:
            if (swapped := self._requests.get(request_id)) is not None:
                swapped.written = True
            table = self._tables.get(self._brought.get(request_id, ""))
            if table is not None and table.request_id == request_id:
                table.written = True
        self._leaving.clear()

    def fail(self) -> list[str]:
        """The step's copies are not whole: nothing of them is here. The requests that were on their way."""
        lost = [request_id for request_id in self._leaving if request_id in self._requests]
        for request_id in lost:
            self.free(request_id)
        self._leaving.clear()
        return lost

    def out(
        self,
        request_id: str,
        blocks: Sequence[int],
        num_tokens: int,
        plan: ItemPlan | None = None,
        table: Sequence[int] = (),
    ) -> list[BlockCopy] | None:
        """The copies that bring a request here, and with it the cross table of `plan`.

        None, and nothing changed, where there is too little room.
        """
        assert request_id not in self._requests, "a request goes out once"
        if plan is not None and plan.mm_hash in self._tables:
            table = ()
        if len(blocks) + len(table) > len(self._free):
            return None
        copies = [BlockCopy(block, self._free.pop()) for block in (*blocks, *table)]
        targets = tuple(copy.target for copy in copies)
        self._requests[request_id] = _Swapped(targets[: len(blocks)], num_tokens)
        self._leaving.append(request_id)
        if plan is not None and table:
            self._tables[plan.mm_hash] = _SwappedTable(plan, targets[len(blocks) :], request_id)
            self._brought[request_id] = plan.mm_hash
        return copies

    def back(self, request_id: str, blocks: Sequence[int]) -> list[BlockCopy]:
        """The copies that bring the request's tokens into the first of `blocks`; its host blocks are free."""
        swapped = self._requests[request_id]
        assert swapped.written, "only what is confirmed is read"
        self.free(request_id)
        return [BlockCopy(block, target) for block, target in zip(swapped.blocks, blocks, strict=False)]

    def table_back(self, mm_hash: str, blocks: Sequence[int]) -> list[BlockCopy]:
        """The copies that bring a cross table into `blocks`; its host blocks are free."""
        table = self._tables.pop(mm_hash)
        assert table.written, "only what is confirmed is read"
        self._free.extend(table.blocks)
        return [BlockCopy(block, target) for block, target in zip(table.blocks, blocks, strict=True)]

    def free(self, request_id: str) -> None:
        """Forgets the request and the cross table that it has brought. Idempotent."""
        swapped = self._requests.pop(request_id, None)
        if swapped is not None:
            self._free.extend(swapped.blocks)
        mm_hash = self._brought.pop(request_id, "")
        table = self._tables.get(mm_hash)
        # Another request may have brought the table here again since.
        if table is not None and table.request_id == request_id:
            del self._tables[mm_hash]
            self._free.extend(table.blocks)

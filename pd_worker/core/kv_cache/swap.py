"""Host blocks for the keys and values of swapped requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.types import ItemPlan


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy of one block, all layers, between the KV cache and host memory."""

    source: int
    target: int


@dataclass(slots=True)
class _Swapped:
    """A request's own blocks; they hold its first `num_tokens` tokens."""

    blocks: tuple[int, ...]
    num_tokens: int
    #: Its copy is confirmed; the blocks may not be read before that.
    written: bool = False


@dataclass(slots=True)
class _SwappedTable:
    """A cross table; it is dropped when the request that it was swapped with is restored, or ends."""

    plan: ItemPlan
    blocks: tuple[int, ...]
    request_id: str
    written: bool = False


class SwapManager:
    """Allocates `num_blocks` host blocks to swapped requests. With 0 nothing is ever swapped.

    ABSENT --swap_out--> LEAVING --commit--> SWAPPED --swap_in--> ABSENT; `fail` takes LEAVING back.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.reset()

    def reset(self) -> None:
        """Frees all host blocks."""
        self._free = list(range(self.num_blocks))
        self._requests: dict[str, _Swapped] = {}
        self._tables: dict[str, _SwappedTable] = {}
        #: The cross table that was swapped with a request.
        self._table_of: dict[str, str] = {}
        #: Requests whose copies are part of the current step.
        self._leaving: list[str] = []

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

    def is_leaving(self, request_id: str) -> bool:
        """The request's copies are not confirmed yet."""
        swapped = self._requests.get(request_id)
        return swapped is not None and not swapped.written

    def has_table(self, plan: ItemPlan) -> bool:
        """The item's cross table is swapped, or being swapped."""
        table = self._tables.get(plan.mm_hash)
        return table is not None and table.plan == plan

    def table_is_written(self, plan: ItemPlan) -> bool:
        """The copy of the item's cross table is confirmed."""
        return self.has_table(plan) and self._tables[plan.mm_hash].written

    def commit(self) -> None:
        """The step's copies are complete: they may be read."""
        for request_id in self._leaving:
            if (swapped := self._requests.get(request_id)) is not None:
                swapped.written = True
            table = self._tables.get(self._table_of.get(request_id, ""))
            if table is not None and table.request_id == request_id:
                table.written = True
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
        if plan is not None and plan.mm_hash in self._tables:
            table = ()
        if not blocks or len(blocks) + len(table) > len(self._free):
            return None
        copies = [BlockCopy(block, self._free.pop()) for block in (*blocks, *table)]
        targets = tuple(copy.target for copy in copies)
        self._requests[request_id] = _Swapped(targets[: len(blocks)], num_tokens)
        self._leaving.append(request_id)
        if plan is not None and table:
            self._tables[plan.mm_hash] = _SwappedTable(plan, targets[len(blocks) :], request_id)
            self._table_of[request_id] = plan.mm_hash
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
        table = self._tables.pop(mm_hash)
        assert table.written, "only confirmed copies are read"
        self._free.extend(table.blocks)
        return [BlockCopy(block, target) for block, target in zip(table.blocks, blocks, strict=True)]

    def free(self, request_id: str) -> None:
        """Frees the host blocks of the request and of the cross table swapped with it. Idempotent."""
        swapped = self._requests.pop(request_id, None)
        if swapped is not None:
            self._free.extend(swapped.blocks)
        mm_hash = self._table_of.pop(request_id, "")
        table = self._tables.get(mm_hash)
        # Another request may have been swapped with the table since.
        if table is not None and table.request_id == request_id:
            del self._tables[mm_hash]
            self._free.extend(table.blocks)

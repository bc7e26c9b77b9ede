"""Block tables of requests, and the prefix cache of their full blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from triptych.pd_worker.core.kv_cache.block_pool import BlockPool
from triptych.pd_worker.core.kv_cache.prefix_chain import PrefixChain
from triptych.pd_worker.core.kv_cache.state_slots import StateSlots, boundaries_of


@dataclass(slots=True)
class _BlockTable:
    blocks: list[int] = field(default_factory=list)
    #: Blocks at the front of the table that are in the prefix cache.
    registered: int = 0


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
        evict_early: float = 0.0,
        states: StateSlots | None = None,
    ) -> None:
        """`evict_early` as in BlockPool; `states` None: the model has no recurrent layers."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks, evict_early=evict_early)
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
        found = self._find_blocks(chain, num_tokens)
        if self.states is not None:
            del found[self.states.longest(chain.digests(len(found))) :]
        return found

    def _find_blocks(self, chain: PrefixChain, num_tokens: int) -> list[int]:
        found: list[int] = []
        if not self.prefix_caching:
            return found
        for digest in chain.digests((num_tokens - 1) // self.block_size):
            block = self.pool.find(digest)
            if block is None:
                break
            found.append(block)
        return found

    def prefix_digests(self, chain: PrefixChain, prefix: list[int], num_tokens: int) -> list[bytes]:
        """The digests of what `find_prefix` has found, and the first one that it has not found."""
        if not self.prefix_caching:
            return []
        if self.states is not None:
            # A snapshot of any of the blocks beyond the prefix would make it longer.
            prefix = self._find_blocks(chain, num_tokens)
        return chain.digests(min(len(prefix) + 1, (num_tokens - 1) // self.block_size))

    def boundaries(
        self, chain: PrefixChain, num_prompt: int, num_tokens: int, computed: int
    ) -> Sequence[int]:
        """Where the state of a prompt is kept, of a request with `computed` of its `num_tokens` tokens."""
        if self.states is None or not self.states.num_snapshots:
            return ()
        shared = len(self._find_blocks(chain, num_tokens)) * self.block_size
        return boundaries_of(num_prompt, self.block_size, computed, shared)

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
        added = self.pool.allocate(new, after=prefix[-1] if prefix else None, grows=True)
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
        table.blocks += self.pool.allocate(new, after=table.blocks[-1] if table.blocks else None, grows=True)
        return True

    def register(self, request_id: str, chain: PrefixChain, num_computed_tokens: int) -> None:
        """Makes the request's full blocks findable, once their keys and values are written.

        With a snapshot where the last of them ends, if one was begun there.
        """
        if not self.prefix_caching:
            return
        table = self._tables[request_id]
        full = num_computed_tokens // self.block_size
        if self.states is not None and full * self.block_size == num_computed_tokens:
            self.states.commit(chain.digests(full)[-1])
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

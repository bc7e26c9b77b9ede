"""Block tables of requests, and the prefix cache of their full blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from triptych.pd_worker.core.kv_cache.block_pool import BlockPool
from triptych.pd_worker.core.kv_cache.prefix_chain import PrefixChain


@dataclass(slots=True)
class _BlockTable:
    blocks: list[int] = field(default_factory=list)
    #: Blocks at the front of the table that are in the prefix cache.
    registered: int = 0


class KVCacheManager:
    """Allocates the requests' block tables: blocks of `block_size` tokens from a pool of `num_blocks`."""

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_caching: bool = True, evict_early: float = 0.0
    ) -> None:
        """`evict_early` as in BlockPool."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks, evict_early=evict_early)
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

    def find_prefix(self, chain: PrefixChain, num_tokens: int) -> list[int]:
        """Blocks that hold the first full blocks of `chain`, never all of `num_tokens`.

        The last token has to be computed: its hidden state gives the next one.
        """
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
        return chain.digests(min(len(prefix) + 1, (num_tokens - 1) // self.block_size))

    def allocate(self, request_id: str, prefix: list[int], num_tokens: int, *, spare: int = 0) -> bool:
        """Allocates `prefix` and new blocks for the rest of `num_tokens` to a request without a table.

        False, and nothing changed, when that would leave fewer than `spare` free blocks.
        """
        assert request_id not in self._tables, "a request starts with an empty table"
        new = self.blocks_for(num_tokens) - len(prefix)
        revived = sum(1 for block in prefix if self.pool.is_free(block))
        if new + revived + spare > self.pool.num_free:
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
        """Makes the request's full blocks findable, once their keys and values are written."""
        if not self.prefix_caching:
            return
        table = self._tables[request_id]
        full = num_computed_tokens // self.block_size
        if full <= table.registered:
            return
        first = table.registered
        self.pool.label(table.blocks[first:full], chain.digests(full, first))
        table.registered = full

    def drain_changes(self) -> set[bytes]:
        """Digests of blocks that were cached or evicted since the last call."""
        return self.pool.drain_changes()

    def reset(self) -> None:
        """Frees all tables and blocks, and empties the prefix cache."""
        self._tables.clear()
        self.pool.reset()

    def free(self, request_id: str) -> None:
        """Releases the request's blocks. Idempotent."""
        table = self._tables.pop(request_id, None)
        if table is None:
            return
        # The end of a prefix is evicted first: a chain without its head is of no use.
        self.pool.release(reversed(table.blocks))

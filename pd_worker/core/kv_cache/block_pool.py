"""The blocks of one KV cache: reference counts, cached contents, and the order of eviction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """`num_blocks` reference-counted blocks, for every kind of block table.

    A block without references is free. Its content can still be found by digest until the block is allocated
    again, least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._by_digest: dict[bytes, int] = {}
        self._changes: set[bytes] = set()
        self.reset()

    def reset(self) -> None:
        """Frees all blocks and forgets their contents."""
        # Lists by block, not an object per block: a large cache has a million blocks.
        self._refs = [0] * self.num_blocks
        self._digests: list[bytes | None] = [None] * self.num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))
        self._changes.update(self._by_digest)
        self._by_digest.clear()

    @property
    def num_free(self) -> int:
        """Blocks that no table holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def is_free(self, block: int) -> bool:
        return self._refs[block] == 0

    def find(self, digest: bytes) -> int | None:
        """The block that holds this content."""
        return self._by_digest.get(digest)

    def allocate(self, count: int = 1) -> list[int]:
        """Free blocks with one reference each, their contents forgotten; KeyError when there are too few."""
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            digest = self._digests[block]
            if digest is not None:
                del self._by_digest[digest]
                self._digests[block] = None
                self._changes.add(digest)
            self._refs[block] = 1
        return blocks

    def add_reference(self, block: int) -> None:
        """One reference more; a free block leaves the free list with its content."""
        if self._refs[block] == 0:
            del self._free[block]
        self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less of each, in this order. The last one frees a block: blocks without a digest are
        allocated first.
        """
        counts, free, digests = self._refs, self._free, self._digests
        for block in blocks:
            refs = counts[block]
            assert refs > 0, f"block {block} is freed twice"
            counts[block] = refs - 1
            if refs == 1:
                free[block] = None
                if digests[block] is None:
                    free.move_to_end(block, last=False)

    def label(self, blocks: Iterable[int], digests: Iterable[bytes]) -> None:
        """Makes written blocks findable by digest; of two blocks with equal content, the first one."""
        known = self._by_digest
        for block, digest in zip(blocks, digests, strict=True):
            if digest not in known:
                known[digest] = block
                self._digests[block] = digest
                self._changes.add(digest)

    def drain_changes(self) -> set[bytes]:
        """Digests that were cached by `label` or evicted with their block since the last call."""
        changes, self._changes = self._changes, set()
        return changes

    def relabel(self, block: int, digest: bytes) -> None:
        """As `label`, but this block replaces any other one under the digest."""
        former = self._by_digest.get(digest)
        if former is not None and former != block:
            self._digests[former] = None
            if self.is_free(former):
                self._free.move_to_end(former, last=False)
        self._by_digest[digest] = block
        self._digests[block] = digest

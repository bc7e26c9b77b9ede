"""Blocks of one KV cache: digests, reference counts, cached contents, and the order of eviction."""

from __future__ import annotations

import struct
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from blake3 import blake3

from triptych.base.types import ItemPlan, MMFeature

_TOKEN_BYTES = 4


class PrefixChain:
    """Digests of a request's full blocks, made once and extended as tokens come.

    A digest covers its parent's, the block's token ids, and (plan, item offset relative to the block's
    start) of every item that overlaps the block, since different images have equal placeholder ids. The whole
    plan, since its grid decides the positions of all later tokens.
    """

    def __init__(
        self,
        root: bytes,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        features: Sequence[MMFeature],
        block_size: int,
        spans: Sequence[tuple[int, int]] = (),
    ) -> None:
        """The tokens of `spans` [start, end) of the prompt attend to one another: each depends on all."""
        self._root = root
        self._num_prompt_tokens = len(prompt_token_ids)
        self._prompt = prompt_token_ids
        self._output = output_token_ids
        #: (offset, end, identity); a cross item, without a span, counts at its offset.
        self._items = [
            (place.offset, place.offset + max(place.length, 1), plan_identity(feature.plan))
            for feature in sorted(features, key=lambda feature: feature.placement.offset)
            for place in (feature.placement,)
        ]
        self._items += [(first, last, self._span_identity(first, last)) for first, last in spans]
        self._block_size = block_size
        self._digests: list[bytes] = []

    def _span_identity(self, first: int, last: int) -> bytes:
        """Digest input for a span: its tokens, and the items in it with their places."""
        content = _packed(self._prompt[first:last])
        for start, end, identity in self._items:
            if start < last and end > first:
                content += identity + (start - first).to_bytes(8, "little", signed=True)
        return blake3(content).digest()

    def digests(self, num_blocks: int, first: int = 0) -> list[bytes]:
        """The digests of blocks [first, num_blocks); as many tokens must be known."""
        digests = self._digests
        if len(digests) < num_blocks:
            self._extend(num_blocks)
        return digests[first:num_blocks]

    def _extend(self, num_blocks: int) -> None:
        digests, size, items = self._digests, self._block_size, self._items
        parent = digests[-1] if digests else self._root
        begin = len(digests) * size
        packed = self._tokens(begin, num_blocks * size)
        for start in range(begin, num_blocks * size, size):
            end, at = start + size, (start - begin) * _TOKEN_BYTES
            content = parent + packed[at : at + size * _TOKEN_BYTES]
            for first, last, identity in items:
                if first < end and last > start:
                    content += identity + (first - start).to_bytes(8, "little", signed=True)
            parent = blake3(content).digest()
            digests.append(parent)

    def _tokens(self, start: int, end: int) -> bytes:
        prompt = self._num_prompt_tokens
        packed = _packed(self._prompt[start:end])
        if end > prompt:
            packed += _packed(self._output[max(0, start - prompt) : end - prompt])
        assert len(packed) == (end - start) * _TOKEN_BYTES, "only full blocks have a digest"
        return packed


def _packed(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def plan_identity(plan: ItemPlan) -> bytes:
    """Digest input for an item: its mm_hash and everything that decides how a prompt uses its embedding."""
    numbers = [plan.rows, plan.width, plan.length, len(plan.grid_thw), *plan.grid_thw]
    for start, count in plan.runs or ():
        numbers += (start, count)
    numbers += plan.layout
    return bytes.fromhex(plan.mm_hash) + plan.dtype.encode() + struct.pack(f"<{len(numbers)}q", *numbers)


class BlockPool:
    """`num_blocks` reference-counted blocks, for every kind of block table.

    A block without references is free. Its content can still be found by digest until the block is allocated
    again, least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        #: Blocks that have been used so far: the first ones.
        self.most_used = 0
        self._by_digest: dict[bytes, int] = {}
        self._changes: set[bytes] = set()
        self.reset()

    def reset(self) -> None:
        """Frees all blocks and forgets their contents."""
        # Lists by block, not an object per block: a large cache has a million blocks.
        self._refs = [0] * self.num_blocks
        self._digests: list[bytes | None] = [None] * self.num_blocks
        #: Free blocks whose content can be found, in the order of eviction; and all others that are free.
        self._cached: OrderedDict[int, None] = OrderedDict()
        #: A stack: a table's blocks are released last one first, and the next table has them in order.
        self._blank = array("i", range(self.num_blocks - 1, -1, -1))
        self._changes.update(self._by_digest)
        self._by_digest.clear()

    @property
    def num_free(self) -> int:
        """Blocks that no table holds."""
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def is_free(self, block: int) -> bool:
        return self._refs[block] == 0

    def find(self, digest: bytes) -> int | None:
        """The block that holds this content."""
        return self._by_digest.get(digest)

    def allocate(self, count: int = 1) -> list[int]:
        """Free blocks with one reference each, their contents forgotten; KeyError when there are too few."""
        if count > self.num_free:
            raise KeyError(f"{count} blocks are wanted and {self.num_free} are free")
        left = max(0, len(self._blank) - count)
        blocks = self._blank[left:].tolist()[::-1]
        del self._blank[left:]
        self.most_used = max(self.most_used, self.num_blocks - left)
        blocks += [self._evict_next() for _ in range(count - len(blocks))]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def _evict_next(self) -> int:
        """Forgets the content of the least recently used block."""
        block, _ = self._cached.popitem(last=False)
        digest = self._digests[block]
        assert digest is not None
        del self._by_digest[digest]
        self._digests[block] = None
        self._changes.add(digest)
        return block

    def add_reference(self, block: int) -> None:
        """One reference more to a block that is used, or whose content was found."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less of each, in this order. The last one frees a block: blocks without a digest are
        allocated first.
        """
        counts, digests = self._refs, self._digests
        for block in blocks:
            refs = counts[block]
            assert refs > 0, f"block {block} is freed twice"
            counts[block] = refs - 1
            if refs == 1:
                if digests[block] is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = None

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
                del self._cached[former]
                self._blank.append(former)
        self._by_digest[digest] = block
        self._digests[block] = digest

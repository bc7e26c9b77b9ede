"""The form of KV blocks in the store: groups of blocks, and the states of recurrent layers, as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.base.hashing import framed_digest
from triptych.base.types import DTYPE_BYTES, ItemPlan
from triptych.pd_worker.attention.metadata import LAYOUT_VERSION

#: Version of this form.
FORM_VERSION = 1
#: Blocks of a group, and about its most bytes: a block alone is too small for a round trip to the store, and
#: a longer prefix that two prompts share is found by whole groups.
GROUP_BLOCKS, GROUP_BYTES = 16, 32 << 20


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks [start, end) of a prefix, of which `digest` is the last one's."""

    start: int
    end: int
    digest: bytes
    plan: ItemPlan


class StoredKV:
    """The values of one decoder's KV: keys, sizes and namespace.

    A group ends at a multiple of `group_blocks`, or where its prompt's full blocks end. Its key is made of
    the digest of its last block, which covers everything before it: model, tenant, tokens, items and spans.
    Blocks of another size have other digests, of other tokens; the namespace keeps apart what digests do not
    cover. Readers compare the whole plan besides: without its dtype in the namespace nobody would read a
    foreign value, but each would delete the other's.
    """

    def __init__(
        self,
        model_key: str,
        *,
        block_size: int,
        width: int,
        dtype: str,
        shapes: Sequence[tuple[int, ...]],
        state_bytes: int = 0,
        ranks: int = 1,
    ) -> None:
        """`width` are the elements of a block, in parts of these `shapes`; `state_bytes` of a snapshot."""
        self.block_size = block_size
        self.width = width
        self.dtype = dtype
        self.state_bytes = state_bytes
        self.block_bytes = width * DTYPE_BYTES[dtype]
        self.group_blocks = max(1, min(GROUP_BLOCKS, GROUP_BYTES // self.block_bytes))
        sizes = f"{block_size} {width} {self.group_blocks} {list(shapes)} {state_bytes}"
        layout = f"{FORM_VERSION} {LAYOUT_VERSION} {sizes}"
        self.namespace = framed_digest(
            (
                ("domain", b"triptych.kv.v1"),
                ("model_key", model_key.encode()),
                ("layout", layout.encode()),
                ("dtype", dtype.encode()),
                ("ranks", str(ranks).encode()),
            )
        )

    def groups(self, digests: Sequence[bytes], first: int = 0) -> list[Group]:
        """The groups of these blocks from the one on that holds block `first`; the last one may be short."""
        size = self.group_blocks
        starts = range(first // size * size, len(digests), size)
        return [self.group(digests, start, min(start + size, len(digests))) for start in starts]

    def shorter(self, digests: Sequence[bytes], group: Group) -> list[Group]:
        """What the group may begin with, the longest first: other prompts' last groups."""
        return [self.group(digests, group.start, end) for end in range(group.end - 1, group.start, -1)]

    def group(self, digests: Sequence[bytes], start: int, end: int) -> Group:
        """Blocks [start, end) as a group."""
        digest = digests[end - 1]
        plan = ItemPlan(
            mm_hash=self._key("blocks", digest),
            namespace=self.namespace,
            modality="kv",
            rows=(end - start) * self.block_size,
            width=self.width // self.block_size,
            dtype=self.dtype,
            length=0,
        )
        return Group(start, end, digest, plan)

    def state(self, digest: bytes) -> ItemPlan:
        """The states of recurrent layers where the block of this digest ends, as bytes."""
        # The store knows no bytes: two of them are a number.
        return ItemPlan(
            self._key("state", digest), self.namespace, "kv", 1, self.state_bytes // 2, "float16", 0
        )

    def _key(self, kind: str, digest: bytes) -> str:
        return framed_digest(
            (("namespace", self.namespace.encode()), ("kind", kind.encode()), ("digest", digest))
        )

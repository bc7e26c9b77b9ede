"""Digests of KV blocks, by which the prefix cache finds them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

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
        self._prompt = _packed(prompt_token_ids)
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
        content = self._prompt[first * _TOKEN_BYTES : last * _TOKEN_BYTES]
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
        for start in range(len(digests) * size, num_blocks * size, size):
            end = start + size
            content = parent + (
                self._prompt[start * _TOKEN_BYTES : end * _TOKEN_BYTES]
                if end <= self._num_prompt_tokens
                else self._tokens(start, end)
            )
            for first, last, identity in items:
                if first < end and last > start:
                    content += identity + (first - start).to_bytes(8, "little", signed=True)
            parent = blake3(content).digest()
            digests.append(parent)

    def _tokens(self, start: int, end: int) -> bytes:
        """Of a block that ends in the output."""
        prompt = self._num_prompt_tokens
        packed = self._prompt[start * _TOKEN_BYTES :]
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

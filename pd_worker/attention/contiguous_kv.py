"""Contiguous keys and values of decoding sequences: gathered once, then extended in place.

Attention over blocks first gathers them, for every layer of every step: more bytes than the attention itself
reads. Most sequences of a step were part of the previous one, one token shorter. So each has a row here:
gathered when the sequence starts to decode, then extended by one token per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from triptych.pd_worker.attention.paged_kv_cache import PagedKVCache
from triptych.pd_worker.core.outputs import ScheduledChunk

#: Tokens of a row when the view is made; it doubles as sequences grow.
_FEWEST_TOKENS = 256
#: Proxy, request and attempt: two proxies may draw the same request id.
_Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class RowContent:
    """What a row holds: the first `length` tokens of an attempt."""

    key: _Key
    length: int


def assign_rows(
    held: Sequence[RowContent | None], wanted: Sequence[RowContent]
) -> tuple[list[int], list[int]]:
    """One of the rows 0 to len(wanted) - 1 for each entry of `wanted`; and the indices of entries to load.

    An entry keeps its row if that row is below len(wanted) and holds exactly this content.
    """
    there = {entry: row for row, entry in enumerate(held[: len(wanted)]) if entry is not None}
    rows = [there.get(want, -1) for want in wanted]
    taken = set(rows)
    free = iter(row for row in range(len(wanted)) if row not in taken)
    missing = [index for index, row in enumerate(rows) if row < 0]
    for index in missing:
        rows[index] = next(free)
    return rows, missing


class DecodeView:
    """Keys and values by row, [rows, num_kv_heads, tokens, head_dim] per layer; at most `limit` bytes."""

    def __init__(self, cache: PagedKVCache, limit: int) -> None:
        self._cache = cache
        self._limit = limit
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._tokens = 0
        self._held: list[RowContent | None] = []
        #: Longest length of each row since it was zeroed.
        self._used: list[int] = []
        #: Of the arranged step: its rows, tokens of a row, and the slots of the new tokens by row and head.
        self._count = self._length = 0
        self._places = torch.empty(0, dtype=torch.int64)

    def arrange(self, decodes: Sequence[ScheduledChunk]) -> list[ScheduledChunk] | None:
        """Assigns rows to `decodes`, one token each, and returns them by row; None if they do not fit.

        All tokens but the new ones have to be in the cache.
        """
        longest = max((len(chunk.block_ids) for chunk in decodes), default=0) * self._cache.block_size
        if not decodes or not self._fit(len(decodes), longest):
            return None
        wanted = [RowContent(_key_of(chunk), chunk.start) for chunk in decodes]
        rows, missing = assign_rows(self._held, wanted)
        for index in missing:
            self._load(rows[index], decodes[index])
        ordered: list[ScheduledChunk] = [decodes[0]] * len(decodes)
        for row, want, chunk in zip(rows, wanted, decodes, strict=True):
            ordered[row] = chunk
            self._held[row] = RowContent(want.key, chunk.end)
            self._used[row] = max(self._used[row], chunk.end)
        self._count, self._length = len(decodes), longest
        heads = torch.arange(self._keys[0].shape[1])[:, None]
        first = torch.arange(len(decodes)) * len(heads)
        starts = torch.tensor([chunk.start for chunk in ordered])
        self._places = ((first + heads) * self._tokens + starts).flatten()
        return ordered

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Adds the new token of each arranged sequence: [num_kv_heads, D, head_dim]."""
        dim = key.shape[-1]
        self._keys[layer].view(-1, dim).index_copy_(0, self._places, key.reshape(-1, dim))
        self._values[layer].view(-1, dim).index_copy_(0, self._places, value.reshape(-1, dim))

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [D, num_kv_heads, tokens, head_dim], `tokens` as of the longest block table."""
        rows, tokens = slice(self._count), slice(self._length)
        return self._keys[layer][rows, :, tokens], self._values[layer][rows, :, tokens]

    def forget(self, chunk: ScheduledChunk) -> None:
        """Zeros the row of a sequence whose keys or values may be NaN or infinity."""
        for row, held in enumerate(self._held):
            if held is not None and held.key == _key_of(chunk):
                self._clear(row, 0)
                self._held[row] = None

    def _fit(self, rows: int, tokens: int) -> bool:
        """Grows the rows where needed; False where that would exceed the limit."""
        if rows <= len(self._held) and tokens <= self._tokens:
            return True
        rows = max(len(self._held), 1 << (rows - 1).bit_length())
        tokens = max(self._tokens, _FEWEST_TOKENS, 1 << (tokens - 1).bit_length())
        if rows * tokens * self._cache.token_bytes > self._limit:
            return False
        _, _, heads, dim = self._cache.keys[0].shape
        # Freed before the new ones are allocated; their sequences are gathered again.
        self._keys, self._values = [], []
        self._keys = [tensor.new_zeros(rows, heads, tokens, dim) for tensor in self._cache.keys]
        self._values = [tensor.new_zeros(rows, heads, tokens, dim) for tensor in self._cache.values]
        self._tokens = tokens
        self._held, self._used = [None] * rows, [0] * rows
        return True

    def _load(self, row: int, chunk: ScheduledChunk) -> None:
        """Gathers all tokens but the new one."""
        count = chunk.start
        table = torch.tensor(chunk.block_ids[: -(-count // self._cache.block_size)], dtype=torch.int64)
        for blocks, rows in zip(
            (*self._cache.keys, *self._cache.values), (*self._keys, *self._values), strict=True
        ):
            tokens = blocks.index_select(0, table).flatten(0, 1)[:count]
            rows[row, :, :count] = tokens.transpose(0, 1)
        self._clear(row, count)

    def _clear(self, row: int, first: int) -> None:
        """Zeros from token `first` on: masked keys are read too and must be finite."""
        if self._used[row] > first:
            for rows in (*self._keys, *self._values):
                rows[row, :, first : self._used[row]] = 0
        self._used[row] = first


def _key_of(chunk: ScheduledChunk) -> _Key:
    request = chunk.state.request
    return (*request.key, request.attempt)

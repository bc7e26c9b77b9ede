"""Decoding sequences in rows of their own."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from triptych.pd_worker.attention.contiguous_kv import DecodeView, RowContent, assign_rows
from triptych.pd_worker.attention.paged_kv_cache import PagedKVCache
from triptych.pd_worker.core.outputs import ScheduledChunk

LAYERS, BLOCKS, SIZE, HEADS, DIM = 2, 64, 4, 2, 8


def key(name: str) -> tuple[str, str, int]:
    return ("proxy", name, 1)


def held(*names: str | None) -> list[RowContent | None]:
    return [None if name is None else RowContent(key(name), 5) for name in names]


def assigned(there: list[RowContent | None], *names: str) -> tuple[list[int], list[int]]:
    return assign_rows(there, [RowContent(key(name), 5) for name in names])


def test_a_sequence_with_a_row_keeps_it_in_any_order() -> None:
    assert assigned(held("a", "b", "c"), "c", "a", "b") == ([2, 0, 1], [])


def test_a_new_sequence_gets_the_row_of_one_that_has_ended() -> None:
    assert assigned(held("a", "b", "c"), "a", "c", "d") == ([0, 2, 1], [2])


def test_fewer_sequences_close_the_gap() -> None:
    assert assigned(held("a", "b", "c"), "b", "c") == ([1, 0], [1])


def test_a_row_of_another_length_does_not_match() -> None:
    assert assign_rows([RowContent(key("a"), 4)], [RowContent(key("a"), 5)]) == ([0], [0])


def test_a_stale_copy_in_another_row_is_not_taken_for_the_sequence() -> None:
    there = [RowContent(key("a"), 5), RowContent(key("a"), 3)]
    assert assign_rows(there, [RowContent(key("a"), 5), RowContent(key("b"), 2)]) == ([0, 1], [1])


def make_cache() -> PagedKVCache:
    return PagedKVCache(
        num_layers=LAYERS,
        num_blocks=BLOCKS,
        block_size=SIZE,
        num_kv_heads=HEADS,
        head_dim=DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def chunk_of(name: str, start: int, blocks: list[int], attempt: int = 1) -> ScheduledChunk:
    request: Any = SimpleNamespace(key=("proxy", name), attempt=attempt)
    state: Any = SimpleNamespace(request=request)
    return ScheduledChunk(state, start, 1, tuple(blocks), (), True)


class Sequences:
    """Random keys and values in a cache, and the view beside them."""

    def __init__(self, limit: int = 1 << 20) -> None:
        self.random = random.Random(7)
        self.generator = torch.Generator().manual_seed(7)
        self.cache = make_cache()
        self.view = DecodeView(self.cache, limit)
        self.free = list(range(BLOCKS))
        self.blocks: dict[str, list[int]] = {}
        self.length: dict[str, int] = {}

    def write(self, name: str) -> torch.Tensor:
        """One more token in the cache; its keys, values of all layers [2, LAYERS, HEADS, DIM]."""
        blocks, place = self.blocks.setdefault(name, []), self.length.setdefault(name, 0)
        if place == len(blocks) * SIZE:
            blocks.append(self.free.pop(self.random.randrange(len(self.free))))
        token = torch.randn(2, LAYERS, HEADS, DIM, generator=self.generator)
        slot = torch.tensor([blocks[place // SIZE] * SIZE + place % SIZE])
        for layer in range(LAYERS):
            self.cache.write(layer, slot, token[0, layer][None], token[1, layer][None])
        self.length[name] += 1
        return token

    def leave(self, name: str) -> None:
        self.free += self.blocks.pop(name)
        del self.length[name]

    def step(self, *names: str) -> None:
        """One token for each, of these or of all; what is read must be what is in the cache."""
        starts = {name: length for name, length in self.length.items() if not names or name in names}
        tokens = {name: self.write(name) for name in starts}
        chunks = [chunk_of(name, start, self.blocks[name]) for name, start in starts.items()]
        ordered = self.view.arrange(chunks)
        assert ordered is not None and sorted(map(id, ordered)) == sorted(map(id, chunks))
        found = [chunk.state.request.key[1] for chunk in ordered]
        for layer in range(LAYERS):
            added = torch.stack([tokens[name][:, layer] for name in found], dim=2)
            self.view.append(layer, added[0], added[1])
            for rows, blocks in zip(
                self.view.read(layer), (self.cache.keys[layer], self.cache.values[layer]), strict=True
            ):
                for row, name in enumerate(found):
                    wanted = blocks[self.blocks[name]].flatten(0, 1)[: self.length[name]].transpose(0, 1)
                    assert torch.equal(rows[row, :, : self.length[name]], wanted)


def test_rows_hold_what_the_blocks_hold_while_sequences_come_grow_and_leave() -> None:
    sequences, seen = Sequences(), 0
    for _ in range(120):
        names = list(sequences.length)
        if names and sequences.random.random() < 0.2:
            sequences.leave(sequences.random.choice(names))
        if len(sequences.length) < 6 and sequences.random.random() < 0.3 and len(sequences.free) > 20:
            seen += 1
            for _ in range(sequences.random.randrange(1, 12)):
                sequences.write(f"s{seen}")
        if sequences.length and len(sequences.free) > 8:
            sequences.step()
    assert seen > 10


def test_a_sequence_that_rests_for_a_step_is_gathered_again() -> None:
    sequences = Sequences()
    for name in ("a", "b"):
        sequences.write(name)
    sequences.step()
    sequences.step("b")
    sequences.step()


def test_no_numbers_of_one_sequence_are_left_for_the_next_in_its_row() -> None:
    sequences = Sequences()
    for _ in range(9):
        sequences.write("bad")
    for tensor in (*sequences.cache.keys, *sequences.cache.values):
        tensor[sequences.blocks["bad"][1]] = float("nan")
    chunk = chunk_of("bad", 9, [*sequences.blocks["bad"], 63])
    assert sequences.view.arrange([chunk]) is not None
    assert not all(tensor.isfinite().all() for tensor in sequences.view.read(0))
    sequences.leave("bad")
    sequences.write("next")
    assert sequences.view.arrange([chunk_of("next", 1, [*sequences.blocks["next"], 62, 61])]) is not None
    for layer in range(LAYERS):
        assert all(tensor.isfinite().all() for tensor in sequences.view.read(layer))


def test_a_sequence_that_is_forgotten_leaves_zeros() -> None:
    sequences = Sequences()
    for _ in range(6):
        sequences.write("a")
    sequences.step()
    chunk = chunk_of("a", 6, sequences.blocks["a"])
    assert any(tensor.any() for tensor in sequences.view.read(0))
    sequences.view.forget(chunk)
    assert not any(tensor.any() for tensor in sequences.view.read(0))


def test_a_later_attempt_is_another_sequence() -> None:
    sequences = Sequences()
    sequences.write("a")
    first = sequences.view.arrange([chunk_of("a", 1, [*sequences.blocks["a"]])])
    sequences.cache.keys[0][sequences.blocks["a"][0]] = 3.0
    again = sequences.view.arrange([chunk_of("a", 1, [*sequences.blocks["a"]], attempt=2)])
    assert first is not None and again is not None
    assert bool((sequences.view.read(0)[0][0, :, 0] == 3.0).all())


@pytest.mark.parametrize("count", [1, 3])
def test_sequences_above_the_limit_have_no_rows(count: int) -> None:
    token = LAYERS * 2 * HEADS * DIM * 4
    sequences = Sequences(limit=2 * 256 * token)
    chunks = [chunk_of(f"s{i}", 3, [i]) for i in range(count)]
    assert (sequences.view.arrange(chunks) is not None) is (count == 1)
    # Long ones neither.
    assert sequences.view.arrange([chunk_of("long", 600, list(range(200)))]) is None


def test_a_step_without_decodes_has_no_rows() -> None:
    assert Sequences().view.arrange([]) is None

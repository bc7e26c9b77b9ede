"""Which keys a query sees, as runs, and which blocks of keys that makes."""

from __future__ import annotations

import pytest
import torch

from triptych.pd_worker.attention.key_ranges import (
    BLOCK,
    KeyRanges,
    of_chunk,
    of_decodes,
    of_mask,
    of_rows,
    whole_blocks,
)

CPU = torch.device("cpu")


def runs(ranges: KeyRanges) -> list[list[tuple[int, int]]]:
    pairs = zip(ranges.first.tolist(), ranges.last.tolist(), strict=True)
    return [list(zip(*pair, strict=True)) for pair in pairs]


def test_a_decode_sees_its_sequence_or_its_window() -> None:
    lengths = torch.tensor([9, 2])
    assert runs(of_decodes(lengths, None)) == [[(0, 9)], [(0, 2)]]
    assert runs(of_decodes(lengths, 3)) == [[(6, 9)], [(0, 2)]]
    assert of_decodes(lengths, 3).position.tolist() == [[8], [1]]


def test_a_chunk_is_causal_by_positions() -> None:
    ranges = of_chunk(3, 6, None, (), CPU)
    assert runs(ranges) == [[(0, 4), (0, 5), (0, 6)]]
    assert runs(of_chunk(3, 6, 2, (), CPU)) == [[(2, 4), (3, 5), (4, 6)]]
    assert ranges.position.tolist() == [[3, 4, 5]]


def test_an_atomic_span_is_seen_both_ways_by_its_own_queries() -> None:
    assert runs(of_chunk(0, 5, None, ((1, 4),), CPU)) == [[(0, 1), (0, 4), (0, 4), (0, 4), (0, 5)]]
    assert runs(of_chunk(0, 5, 1, ((1, 4),), CPU)) == [[(0, 1), (1, 4), (1, 4), (1, 4), (4, 5)]]


def test_all_queries_see_all_rows() -> None:
    assert runs(of_rows(torch.tensor([7, 2]), 2)) == [[(0, 7), (0, 7)], [(0, 2), (0, 2)]]


def test_a_mask_is_read_as_the_runs_that_it_has() -> None:
    mask = torch.tensor([[[[True, True, False]]], [[[False, True, True]]]])
    assert runs(of_mask(mask, 2, 2)) == [[(0, 2), (0, 2)], [(1, 3), (1, 3)]]
    assert runs(of_mask(torch.ones(2, 2, dtype=torch.bool).tril(), 1, 2)) == [[(0, 1), (0, 2)]]


def test_what_is_added_sees_one_key() -> None:
    ranges = of_decodes(torch.tensor([9]), None).repeated(2).padded(2, 3)
    assert runs(ranges) == [[(0, 9), (0, 9), (0, 1)], [(0, 1)] * 3]


@pytest.mark.parametrize(("count", "whole"), [(1, 256), (256, 256), (257, 384), (700, 768)])
def test_sizes_come_to_two_blocks_at_least(count: int, whole: int) -> None:
    assert whole_blocks(count) == whole


@pytest.mark.parametrize("window", [None, 100])
def test_the_blocks_of_a_chunk_hold_every_key_that_is_seen_and_no_block_too_many(window: int | None) -> None:
    ranges = of_chunk(200, 456, window, (), CPU)
    counts, indices = ranges.blocks(512)
    assert counts.shape == (1, 1, 2)
    assert indices.shape == (1, 1, 2, 4)
    for row in range(2):
        mine = runs(ranges)[0][row * BLOCK : (row + 1) * BLOCK]
        needed = {key // BLOCK for first, last in mine for key in range(first, last)}
        assert indices[0, 0, row, : counts[0, 0, row]].tolist() == sorted(needed)
    assert int(indices.max()) < 4


def test_fewer_queries_than_a_block_are_one_block() -> None:
    counts, indices = of_decodes(torch.tensor([300, 1]), 20).repeated(2).blocks(384)
    assert counts.tolist() == [[[1]], [[1]]]
    assert indices[:, 0, 0, 0].tolist() == [2, 0]

"""Runs of a block table are its tokens, in order, in as few slices as there are."""

from __future__ import annotations

import random

import pytest

from triptych.pd_worker.attention.metadata import KVRun, attends_in_runs, last_tokens, runs_of


def slots_of(runs: tuple[KVRun, ...]) -> list[int]:
    return [slot for first, last in runs for slot in range(first, last)]


@pytest.mark.parametrize("seed", range(100))
def test_runs_are_the_slots_of_the_tokens_and_no_two_of_them_touch(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.choice([1, 4, 16])
    table: list[int] = []
    while len(table) < draw.randrange(1, 30):
        first = draw.randrange(40)
        table += [block for block in range(first, first + draw.randrange(1, 9)) if block not in table]
    length = draw.randrange(1, len(table) * size + 1)
    runs = runs_of(table, length, size)
    tokens = [table[i // size] * size + i % size for i in range(length)]
    assert slots_of(runs) == tokens
    assert all(former.last != latter.first for former, latter in zip(runs, runs[1:], strict=False))
    for window in (1, size, length - 1, length, length + 5):
        assert slots_of(last_tokens(runs, window)) == tokens[-window:] if window else True
    assert last_tokens(runs, 0) == ()


def test_blocks_behind_the_last_token_are_no_part_of_a_run() -> None:
    assert runs_of((5, 6, 7, 2), 6, 4) == (KVRun(20, 26),)
    assert runs_of((5, 2, 9), 5, 4) == (KVRun(20, 24), KVRun(8, 9))
    assert runs_of((5,), 0, 4) == ()


def test_a_sequence_attends_in_runs_when_there_is_one_or_when_they_are_long() -> None:
    assert attends_in_runs([KVRun(0, 3)])
    assert attends_in_runs([KVRun(0, 100), KVRun(200, 230)])
    assert not attends_in_runs([KVRun(32 * i, 32 * i + 16) for i in range(30)])
    assert not attends_in_runs([])

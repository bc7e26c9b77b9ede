"""Every copy of a preempted request's blocks fails in turn: it is recomputed, and all answers are right."""

from __future__ import annotations

import threading

import pytest

from support.engine.engine_cell import reference
from support.engine.failing_copies import fail_each_in_turn, fail_swaps_of_cross_tables, swapping_cell
from support.engine.prompts import SIX
from support.matrix import matrix
from triptych.pd_worker.runner import model_runner

TOKENS = 24


@pytest.mark.parametrize("prefix_caching", matrix([True, False]))
def test_pictures_and_texts_are_answered_alike_whichever_copy_fails(checkpoint, prefix_caching):
    expected = [reference(checkpoint.path, prompt, TOKENS).token_ids for prompt in SIX]
    flags = {"block_size": 4, "max_model_len": 128, "max_num_batched_tokens": 64}
    fail_each_in_turn(
        lambda: swapping_cell(checkpoint, 40, prefix_caching=prefix_caching, **flags),
        lambda cell: cell.answer(SIX, TOKENS),
        expected,
        at_least=2,
    )


@pytest.mark.slow
def test_texts_are_answered_alike_whichever_copy_of_a_cross_table_fails() -> None:
    fail_swaps_of_cross_tables("cpu")


def test_a_copy_that_loses_the_device_ends_the_engine(checkpoint, monkeypatch):

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    # Known beforehand: all are submitted at once, or each may end before the next, and none is preempted.
    ids = [reference(checkpoint.path, prompt, TOKENS).prompt_token_ids for prompt in SIX]
    with swapping_cell(checkpoint, 40, block_size=4, max_model_len=128) as cell:
        dead = threading.Event()
        cell.engine.beat.on_death(dead.set)
        monkeypatch.setattr(model_runner, "copy_blocks", fail)
        for prompt, each in zip(SIX, ids, strict=True):
            cell.engine.submit(cell.request(prompt, each, TOKENS))
        assert dead.wait(30)

"""Every copy of a preempted request's blocks fails in turn: it is recomputed, and all answers are right."""

from __future__ import annotations

import threading

import pytest

from support.data.checkpoints import build_checkpoint
from support.encdec.batches import varied
from support.encdec.cell import EncDecCheckpoint
from support.engine.engine_cell import Checkpoint, EngineCell, Prompt, reference
from support.engine.failing_copies import fail_each_in_turn, swapping_cell
from support.matrix import matrix
from triptych.pd_worker.runner import model_runner

TOKENS = 24
PROMPTS = [
    Prompt("What is this?", ((1, 96, 64),)),
    Prompt("Say something about the weather, and then about the sea."),
    Prompt("And these?", ((2, 64, 96), (1, 96, 64))),
    Prompt("One more, and then another one."),
    Prompt("What is that?", ((4, 96, 96),)),
    Prompt("Who has seen the wind?"),
]


@pytest.mark.parametrize("prefix_caching", matrix([True, False]))
def test_pictures_and_texts_are_answered_alike_whichever_copy_fails(
    checkpoint: Checkpoint, prefix_caching: bool
) -> None:
    expected = [reference(checkpoint.path, prompt, TOKENS).token_ids for prompt in PROMPTS]
    flags = {"block_size": 4, "max_model_len": 128, "max_num_batched_tokens": 64}
    fail_each_in_turn(
        lambda: swapping_cell(checkpoint, 40, prefix_caching=prefix_caching, **flags),
        lambda cell: cell.answer(PROMPTS, TOKENS),
        expected,
        at_least=2,
    )


@pytest.mark.slow
def test_texts_are_answered_alike_whichever_copy_of_a_cross_table_fails() -> None:
    bart = EncDecCheckpoint.open(build_checkpoint("bart"))
    prompt = list(bart.decoder.prompt_defaults({}).token_ids)
    inputs, expected = zip(*varied(bart, "bart", 4), strict=True)

    def answers(cell: EngineCell) -> list[list[int]]:
        return cell.finish([bart.request(cell, each, prompt, 64) for each in inputs])

    fail_each_in_turn(
        lambda: swapping_cell(bart, 28, block_size=4, max_model_len=80),
        answers,
        [result.token_ids for result in expected],
        at_least=2,
    )


def test_a_copy_that_loses_the_device_ends_the_engine(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    # Known beforehand: all are submitted at once, or each may end before the next, and none is preempted.
    ids = [reference(checkpoint.path, prompt, TOKENS).prompt_token_ids for prompt in PROMPTS]
    with swapping_cell(checkpoint, 40, block_size=4, max_model_len=128) as cell:
        dead = threading.Event()
        cell.engine.beat.on_death(dead.set)
        monkeypatch.setattr(model_runner, "copy_blocks", fail)
        for prompt, each in zip(PROMPTS, ids, strict=True):
            cell.engine.submit(cell.request(prompt, each, TOKENS))
        assert dead.wait(30)

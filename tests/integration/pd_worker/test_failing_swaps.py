"""Every copy of a preempted request's blocks fails in turn: it is recomputed, and all answers are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from support.checkpoints import build_checkpoint
from support.encdec_batches import varied
from support.encdec_cell import EncDecCheckpoint
from support.engine_cell import Checkpoint, EngineCell, Prompt, engine_cell, reference
from triptych.pd_worker import model_runner
from triptych.pd_worker.capacity import block_bytes

TOKENS = 24
PROMPTS = [
    Prompt("What is this?", ((1, 96, 64),)),
    Prompt("Say something about the weather, and then about the sea."),
    Prompt("And these?", ((2, 64, 96), (1, 96, 64))),
    Prompt("One more, and then another one."),
    Prompt("What is that?", ((4, 96, 96),)),
    Prompt("Who has seen the wind?"),
]

Answers = Callable[[EngineCell], list[list[int]]]


class FailingCopies:
    """`copy_blocks` that raises in its n-th call, with half of the blocks copied and the last one spoiled."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.calls = 0
        self._copy = model_runner.copy_blocks

    def __call__(self, source: Any, target: Any, copies: Any) -> None:
        if not copies:
            return self._copy(source, target, copies)
        self.calls += 1
        if self.calls - 1 != self.n:
            return self._copy(source, target, copies)
        self._copy(source, target, copies[: len(copies) // 2])
        raise RuntimeError("injected")


@contextmanager
def swapping_cell(checkpoint: Any, blocks: int, **flags: Any) -> Iterator[EngineCell]:
    geometry = checkpoint.decoder.geometry
    memory = blocks * block_bytes(geometry, flags["block_size"], torch.float32)
    with engine_cell(checkpoint, kv_memory=memory, preemption="swap", **flags) as cell:
        yield cell


def fail_each_in_turn(
    cell_of: Callable[[], Any], answers: Answers, expected: list[list[int]], at_least: int
) -> None:
    n, preempted = -1, 0.0
    while True:
        with pytest.MonkeyPatch.context() as patch, cell_of() as cell:
            copies = FailingCopies(n)
            patch.setattr(model_runner, "copy_blocks", copies)
            assert answers(cell) == expected, f"copy {n} failed"
            cell.assert_at_rest()
            preempted += cell.metric("vllm:num_preemptions_total")
        if copies.calls <= n:
            break
        n += 1
    assert n >= at_least, "copies were made, out and in"
    assert preempted > n


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_pictures_and_texts_are_answered_alike_whichever_copy_fails(prefix_caching: bool) -> None:
    torch.set_num_threads(1)
    checkpoint = Checkpoint.open("qwen3_vl")
    expected = [reference(checkpoint.path, prompt, TOKENS).token_ids for prompt in PROMPTS]
    flags = {"block_size": 4, "max_model_len": 128, "max_num_batched_tokens": 64}
    fail_each_in_turn(
        lambda: swapping_cell(checkpoint, 40, prefix_caching=prefix_caching, **flags),
        lambda cell: cell.answer(PROMPTS, TOKENS),
        expected,
        at_least=2,
    )


def test_texts_are_answered_alike_whichever_copy_of_a_cross_table_fails() -> None:
    torch.set_num_threads(1)
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

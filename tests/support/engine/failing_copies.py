"""Copies of KV blocks between device and host that fail, each in turn, beside real engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.data.checkpoints import build_checkpoint
from support.encdec.batches import varied
from support.encdec.cell import EncDecCheckpoint
from support.engine.engine_cell import EngineCell, engine_cell
from triptych.pd_worker.runner import model_runner
from triptych.pd_worker.runner.capacity import block_bytes
from triptych.pd_worker.runner.host_kv_cache import copy_blocks

Answers = Callable[[EngineCell], list[list[int]]]


class FailingCopies:
    """`copy_blocks` that raises in its n-th call, with half of the blocks copied and the last one spoiled."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.calls = 0
        self._copy = copy_blocks

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
    memory = blocks * block_bytes(geometry, flags["block_size"], checkpoint.decoder.dtype)
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


def fail_swaps_of_cross_tables(device: str) -> None:
    """Texts are answered alike whichever copy of a cross table fails."""
    bart = EncDecCheckpoint.open(build_checkpoint("bart"), device=device)
    prompt = list(bart.decoder.prompt_defaults({}).token_ids)
    inputs, expected = zip(*varied(bart, "bart", 4), strict=True)
    fail_each_in_turn(
        lambda: swapping_cell(bart, 28, block_size=4, max_model_len=80),
        lambda cell: cell.finish([bart.request(cell, each, prompt, 64) for each in inputs]),
        [result.token_ids for result in expected],
        at_least=2,
    )

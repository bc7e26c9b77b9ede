"""An engine of two ranks that both hold the whole decoder: every step is the same on both, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from support.data.checkpoints import build_checkpoint
from support.encdec.batches import varied
from support.encdec.cell import EncDecCheckpoint
from support.engine.engine_cell import Checkpoint, EngineCell, Prompt, engine_cell, reference
from support.engine.failing_copies import swapping_cell
from support.pd_ranks.twin_rank import TWIN_THREAD, TwinRank
from triptych.base.ranks.channel import Message
from triptych.pd_worker.core.request_events import RequestFinished
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


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Checkpoint]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Checkpoint.open("qwen3_vl")
    torch.set_num_threads(threads)


@contextmanager
def twin_cell(
    checkpoint: Any, cell_of: Callable[..., Any] = engine_cell, **flags: Any
) -> Iterator[tuple[EngineCell, TwinRank]]:
    """A cell that `cell_of` makes of the checkpoint, with a twin of its rank."""
    twin = TwinRank(checkpoint.decoder)
    with cell_of(checkpoint, ranks=twin, **flags) as cell:
        twin.leader = cell.engine.runner
        yield cell, twin


def answered_as_expected(cell: EngineCell, checkpoint: Checkpoint) -> None:
    assert cell.answer(PROMPTS, TOKENS) == expected(checkpoint)
    cell.assert_at_rest()


def expected(checkpoint: Checkpoint) -> list[list[int]]:
    return [reference(checkpoint.path, prompt, TOKENS).token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_requests_are_the_same_on_both(checkpoint: Checkpoint, preemption: str) -> None:
    geometry = checkpoint.decoder.geometry
    block = 2 * geometry.num_layers * 4 * geometry.num_kv_heads * geometry.head_dim * 4
    flags = {"block_size": 4, "kv_memory": 40 * block, "max_model_len": 128, "preemption": preemption}
    with twin_cell(checkpoint, **flags) as (cell, twin):
        answered_as_expected(cell, checkpoint)
        assert cell.metric("vllm:num_preemptions_total") > 0
        assert twin.compared > TOKENS * len(PROMPTS)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("turn", [1, 2])
def test_a_copy_that_fails_on_one_rank_has_failed_on_both(
    checkpoint: Checkpoint, rank: int, turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turn 1: copies out of the first swap; turn 2: copies of the first swap back in."""
    copy, counts = model_runner.copy_blocks, {0: 0, 1: 0}

    def failing(source: Any, target: Any, copies: Any) -> None:
        mine = int(threading.current_thread().name.startswith(TWIN_THREAD))
        counts[mine] += bool(copies)
        if copies and mine == rank and counts[mine] == turn:
            raise MemoryError("no room on this rank")
        copy(source, target, copies)

    monkeypatch.setattr(model_runner, "copy_blocks", failing)
    flags = {"blocks": 40, "block_size": 4, "max_model_len": 128, "max_num_batched_tokens": 64}
    with twin_cell(checkpoint, swapping_cell, **flags) as (cell, _):
        answered_as_expected(cell, checkpoint)
        assert counts[rank] >= turn


def test_cross_tables_are_the_same_on_both() -> None:
    torch.set_num_threads(1)
    bart = EncDecCheckpoint.open(build_checkpoint("bart"))
    prompt = list(bart.decoder.prompt_defaults({}).token_ids)
    inputs, results = zip(*varied(bart, "bart", 4), strict=True)
    with twin_cell(bart, swapping_cell, blocks=28, block_size=4, max_model_len=80) as (cell, _):
        answers = cell.finish([bart.request(cell, each, prompt, 64) for each in inputs])
        assert answers == [result.token_ids for result in results]
        assert cell.metric("vllm:num_preemptions_total") > 0


@pytest.mark.parametrize("fault", ["another batch", "a failure of the model"])
def test_ranks_that_are_not_one_any_more_end_the_worker_and_answer_nothing(
    checkpoint: Checkpoint, fault: str
) -> None:
    dead = threading.Event()

    def another(report: Message) -> Message:
        return {**report, "batch_digest": report["batch_digest"] + 1}

    with twin_cell(checkpoint) as (cell, twin):
        cell.engine.beat.on_death(dead.set)
        request = cell.request(PROMPTS[1], reference(checkpoint.path, PROMPTS[1], TOKENS).prompt_token_ids, 8)
        if fault == "another batch":
            twin.alter = another
        else:
            request.positions = request.positions[:, :-1]
        cell.engine.submit(request)
        assert dead.wait(30)
        ends = [event for event in cell.events if isinstance(event, RequestFinished)]
        assert not ends, "a proxy has to see a lost worker, not an answer"

"""A run of decode steps leaves the scheduler as its single steps would, and ends where anything changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.engine.engine_requests import FAR, make_request
from triptych.ec_connector.base import ECTransferConfig
from triptych.ec_connector.connectors.scheduler_role import TableScheduler
from triptych.pd_worker.core.admission import Admission
from triptych.pd_worker.core.decode_runs import CountedOutput, DecodeRuns
from triptych.pd_worker.core.encoder_cache import EncoderCache
from triptych.pd_worker.core.items import ItemTracker
from triptych.pd_worker.core.kv_cache.kv_cache_manager import KVCacheManager
from triptych.pd_worker.core.limits import SchedulerLimits
from triptych.pd_worker.core.outputs import ModelRunnerOutput, SchedulerOutput
from triptych.pd_worker.core.request_events import EngineEvent, NewTokens, RequestFinished
from triptych.pd_worker.core.scheduler import Scheduler

TOKEN, BLOCK = 7, 4


def decoding(
    *requests: tuple[int, int], num_blocks: int = 64, deadline: float = FAR
) -> tuple[Scheduler, DecodeRuns]:
    """A scheduler whose requests, of these prompt and output tokens, have their first token."""
    items = ItemTracker(EncoderCache(0), Admission(0), TableScheduler(ECTransferConfig(ec_role="consumer")))
    limits = SchedulerLimits(8, 256, 128)
    scheduler = Scheduler(limits, KVCacheManager(num_blocks, BLOCK), items, count_only=True)
    for index, (prompt, length) in enumerate(requests):
        tokens = [100 * index + i for i in range(prompt)]
        request = make_request(f"r{index}", tokens, arrival=float(index), deadline=deadline)
        scheduler.add(replace(request, output=CountedOutput(length, TOKEN)), 0.0)
    step(scheduler, 0.0)
    return scheduler, DecodeRuns(scheduler)


def step(scheduler: Scheduler, now: float) -> list[EngineEvent]:
    output = scheduler.schedule(now)
    sampled = [TOKEN] * sum(chunk.samples for chunk in output.chunks)
    return scheduler.update(output, ModelRunnerOutput(sampled=sampled), now)


def state_of(scheduler: Scheduler) -> object:
    pool = scheduler.kv.pool
    return [
        (
            state.num_computed_tokens,
            state.last_token_at,
            list(state.request.output_token_ids),
            scheduler.kv.table(state.request_id),
            [pool.find(digest) for digest in state.chain.digests(state.num_computed_tokens // BLOCK)],
        )
        for state in scheduler.running
    ]


@pytest.mark.parametrize("steps", [1, 2, 5, 11])
def test_a_run_leaves_what_its_steps_would_leave(steps: int) -> None:
    shapes = ((3, 40), (8, 40), (5, 40))
    single, _ = decoding(*shapes)
    events = [event for at in range(steps) for event in step(single, at + 1.0)]
    at_once, runs = decoding(*shapes)
    told = runs.advance(steps, float(steps))
    assert state_of(at_once) == state_of(single)
    for event in told:
        alone = [e for e in events if isinstance(e, NewTokens) and e.request_id == event.request_id]
        assert event.position == alone[0].position
        assert list(event.token_ids) == [token for e in alone for token in e.token_ids]


def test_a_run_ends_with_the_first_request_that_ends() -> None:
    scheduler, runs = decoding((3, 40), (8, 6))
    steps = runs.steps_left(lambda i: 0.0)
    assert steps == 5
    runs.advance(steps, 1.0)
    assert [state.request.request_id for state in scheduler.running] == ["r0"]
    assert scheduler.has_events, "the end comes with the next update"
    [end, *_] = scheduler.update(SchedulerOutput(0), ModelRunnerOutput(), 1.0)
    assert isinstance(end, RequestFinished) and end.request_id == "r1"


def test_a_run_needs_only_free_blocks() -> None:
    scheduler, runs = decoding((4, 100), num_blocks=4)
    steps = runs.steps_left(lambda i: 0.0)
    runs.advance(steps, 1.0)
    assert 0 < steps <= 12
    assert len(scheduler.kv.table(scheduler.running[0].request_id)) <= 4


def test_a_run_passes_no_deadline() -> None:
    _, runs = decoding((4, 100), deadline=10.0)
    steps = runs.steps_left(lambda i: float(i))
    assert 0 < steps <= 10


def test_a_plain_step_decodes_all_running_requests_and_nothing_else() -> None:
    scheduler, runs = decoding((3, 40), (8, 3))
    assert runs.is_plain(scheduler.schedule(1.0))
    scheduler, runs = decoding((3, 40), (8, 3))
    scheduler.add(replace(make_request("new", 4), output=CountedOutput(3, TOKEN)), 1.0)
    assert not runs.is_plain(scheduler.schedule(1.0)), "a request starts"

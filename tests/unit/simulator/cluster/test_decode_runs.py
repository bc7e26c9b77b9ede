"""A run of decode steps leaves the scheduler as its single steps would, and ends before anything changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.engine.engine_requests import FAR, make_request
from triptych.ec_connector.base import ECTransferConfig
from triptych.ec_connector.connectors.scheduler_role import TableScheduler
from triptych.pd_worker.core.admission import Admission
from triptych.pd_worker.core.encoder_cache import EncoderCache
from triptych.pd_worker.core.items import ItemTracker
from triptych.pd_worker.core.kv_cache.kv_cache_manager import KVCacheManager
from triptych.pd_worker.core.limits import SchedulerLimits
from triptych.pd_worker.core.outputs import ModelRunnerOutput, SchedulerOutput
from triptych.pd_worker.core.request_events import EngineEvent, NewTokens, RequestFinished
from triptych.pd_worker.core.scheduler import Scheduler
from triptych.simulator.cluster.decode_runs import CountedOutput, DecodeRuns

TOKEN, BLOCK = 7, 4


def decoding(
    *requests: tuple[int, int], num_blocks: int = 64, deadline: float = FAR
) -> tuple[Scheduler, DecodeRuns]:
    """A scheduler whose requests, of these prompt and output tokens, have their first token."""
    items = ItemTracker(EncoderCache(0), Admission(0), TableScheduler(ECTransferConfig(ec_role="consumer")))
    limits = SchedulerLimits(8, 256, 128)
    scheduler = Scheduler(limits, KVCacheManager(num_blocks, BLOCK), items)
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
    advanced = runs.advance(steps, float(steps))
    assert state_of(at_once) == state_of(single)
    assert advanced == [state.request.request_id for state in at_once.running]
    for request_id in advanced:
        alone = [e for e in events if isinstance(e, NewTokens) and e.request_id == request_id]
        assert sum(len(e.token_ids) for e in alone) == steps


def test_a_run_ends_before_the_step_that_ends_a_request() -> None:
    shapes = ((3, 40), (8, 6))
    single, _ = decoding(*shapes)
    events = [event for at in range(5) for event in step(single, at + 1.0)]
    at_once, runs = decoding(*shapes)
    assert runs.steps_left(lambda i: 0.0) == 4
    runs.advance(4, 4.0)
    assert not at_once.update(SchedulerOutput(0), ModelRunnerOutput(), 4.0)
    end = step(at_once, 5.0)[-1]
    assert end == events[-1] and isinstance(end, RequestFinished)
    assert state_of(at_once) == state_of(single)


def test_a_run_may_begin_with_a_step_that_is_scheduled_already() -> None:
    single, _ = decoding((3, 40), (8, 40))
    for at in range(6):
        step(single, at + 1.0)
    at_once, runs = decoding((3, 40), (8, 40))
    at_once.schedule(1.0)
    runs.advance(6, 6.0)
    assert state_of(at_once) == state_of(single)


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
    scheduler, runs = decoding((3, 40), (8, 40))
    output = scheduler.schedule(1.0)
    assert runs.is_plain(output)
    scheduler.update(output, ModelRunnerOutput(sampled=[TOKEN] * 2), 1.0)
    scheduler.add(replace(make_request("new", 4), output=CountedOutput(3, TOKEN)), 2.0)
    assert not runs.is_plain(scheduler.schedule(2.0)), "a prompt is computed in it"


def test_a_step_that_computes_an_evicted_request_again_is_not_plain() -> None:
    scheduler, runs = decoding((6, 12), (6, 12), num_blocks=5)
    plain = []
    for at in range(40):
        output = scheduler.schedule(at + 1.0)
        again = any(chunk.count > 1 for chunk in output.chunks)
        plain.append((runs.is_plain(output), again or bool(output.preempted)))
        sampled = [TOKEN] * sum(chunk.samples for chunk in output.chunks)
        scheduler.update(output, ModelRunnerOutput(sampled=sampled), at + 1.0)
        if not scheduler.num_running and not scheduler.num_waiting:
            break
    assert any(other for _, other in plain)
    assert not any(is_plain and other for is_plain, other in plain)

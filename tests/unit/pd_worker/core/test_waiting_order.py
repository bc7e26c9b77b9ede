"""The order of waiting requests, and what a step costs."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine.engine_requests import (
    STORE,
    WIDTH,
    Make,
    ModellessEngine,
    finished,
    make_cross,
    make_feature,
    make_request,
    names,
    publish,
)
from support.hostile.operations import operations
from support.matrix import matrix
from triptych.base.types import MMFeature
from triptych.ec_connector.connectors.memory import MemoryStore
from triptych.pd_worker.core.admission import OrderedRequests
from triptych.pd_worker.core.chunks import Budget
from triptych.pd_worker.core.outputs import SchedulerOutput
from triptych.pd_worker.core.request import EngineRequest, RequestState
from triptych.pd_worker.core.request_events import EngineEvent
from triptych.pd_worker.core.scheduler import Scheduler
from triptych.pd_worker.core.waiting_requests import waits_for_items
from triptych.protos.pd_pb2 import RequestEvent

POOL = 5


def started(output: SchedulerOutput) -> list[str]:
    return [chunk.state.request.request_id for chunk in output.chunks]


def test_requests_taken_up_again_start_before_new_ones_in_the_order_of_their_arrival(make: Make) -> None:
    engine = make(max_num_seqs=1)
    engine.add(
        make_request("new", 4, arrival=1.0),
        make_request("second", [3] * 4, arrival=3.0, attempt=2),
        make_request("first", [5] * 4, arrival=2.0, attempt=4),
    )
    assert [started(output)[0] for output in engine.run_out()] == ["first", "second", "new"]


def test_a_request_that_a_prefill_worker_still_has_waits_like_a_new_one(make: Make) -> None:
    engine = make(max_num_seqs=1)
    engine.add(
        replace(make_request("planned", [3] * 4, arrival=2.0, attempt=2), planned=True),
        make_request("new", 4, arrival=1.0),
        make_request("lost", [5] * 4, arrival=3.0, attempt=2),
    )
    assert [started(output)[0] for output in engine.run_out()] == ["lost", "new", "planned"]


def test_requests_taken_up_again_get_room_before_new_ones(make: Make) -> None:
    image = [make_feature(name, 1, 4) for name in ("a", "b", "c")]
    engine = make(capacity=2 * image[0].plan.nbytes)
    engine.add(make_request("running", 8, [image[0]], ready=[], arrival=0.0))
    engine.step()
    engine.add(make_request("new", 8, [image[1]], ready=[], arrival=1.0))
    engine.add(make_request("resumed", 8, [image[2]], ready=[], arrival=2.0, attempt=2))
    engine.step()
    assert names(engine.of("admitted")) == ["running", "resumed"]


def test_a_new_request_gives_its_blocks_up_before_one_taken_up_again(make: Make) -> None:
    engine = make(num_blocks=4, prefix_caching=False)
    engine.add(make_request("new", 4, arrival=0.0, max_tokens=12))
    engine.add(make_request("resumed", [3] * 4, arrival=5.0, attempt=2, max_tokens=12))
    preempted = [state.request.request_id for output in engine.run_out() for state in output.preempted]
    assert set(preempted) == {"new"}
    assert set(finished(engine)) == {"new", "resumed"}


class LooksAtAll(Scheduler):
    """Looks at every waiting request in every step, before the running ones are scheduled and after."""

    def schedule(self, now: float) -> SchedulerOutput:
        self._waiting.recheck(list(self._requests))
        return super().schedule(now)

    def _start(self, output: SchedulerOutput, budget: Budget, now: float) -> bool:
        for state in self._requests:
            if waits_for_items(state):
                self._waiting.startable.add(state)
        return super()._start(output, budget, now)


def _outcome(output: SchedulerOutput, engine: ModellessEngine) -> object:
    events = [_without_times(event) for event in engine.events]
    engine.events.clear()
    chunks = [(c.state.request.request_id, c.start, c.count, c.block_ids) for c in output.chunks]
    return chunks, names(output.preempted), output.evicted, output.projections, events


def _without_times(event: EngineEvent) -> EngineEvent:
    if isinstance(event, RequestEvent) and event.HasField("finished"):
        for stage in ("queue", "load", "prefill", "decode", "work"):
            event.finished.ClearField(f"{stage}_seconds")  # type: ignore[arg-type]
    return event


def _feature(index: int, offset: int = 0, *, cross: bool, atomic: bool = False) -> MMFeature:
    if cross:
        return make_cross(f"c{index}", 3 + index)
    return make_feature(f"i{index}", offset, 3 + index, atomic=atomic)


def _draw(rng: random.Random, name: str, *, cross: bool) -> EngineRequest:
    features, offset, atomic = [], 4 * rng.randint(0, 2), rng.random() < 0.3
    for _ in range(1 if cross else rng.choice([0, 1, 2, 3])):
        features.append(_feature(rng.randrange(POOL), offset, cross=cross, atomic=atomic))
        offset += features[-1].placement.length
    prompt = [rng.randint(0, 1)] * (offset + rng.randint(1, 6))
    return make_request(
        name,
        prompt,
        features,
        max_tokens=rng.randint(1, 14),
        arrival=float(name[1:]),
        attempt=rng.choice((1, 1, 1, 2)),
        ready=[feature.mm_hash for feature in features if rng.random() < 0.3],
    )


@pytest.mark.parametrize(
    ("cross", "host_blocks"), matrix([(False, 0), (True, 12), (False, 12), (True, 0)], quick=2)
)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_looking_only_where_something_has_happened_decides_as_looking_at_all(cross, host_blocks, seed):
    outcomes = []
    for kind in (Scheduler, LooksAtAll):
        rng = random.Random(seed)
        STORE.clear()
        engine = ModellessEngine(
            STORE,
            num_blocks=rng.randint(10, 16),
            budget=rng.choice([8, 16, 64]),
            max_num_seqs=rng.randint(2, 6),
            capacity=16 * rng.randint(21, 40),
            max_model_len=40,
            prefix_caching=rng.random() < 0.8,
            cross=cross,
            host_blocks=host_blocks,
        )
        engine.scheduler.__class__ = kind
        requests = [_draw(rng, f"r{i}", cross=cross) for i in range(14)]
        outcome: list[object] = []
        for _ in range(120):
            if requests and rng.random() < 0.6:
                engine.add(requests.pop())
            if rng.random() < 0.5:
                image = _feature(rng.randrange(POOL), cross=cross)
                if rng.random() < 0.95:
                    engine.arrive(image)
            if rng.random() < 0.03:
                STORE.clear()
            if rng.random() < 0.05:
                engine.scheduler.cancel([f"r{rng.randint(0, 13)}"], "proxy")
            outcome.append(_outcome(engine.step(), engine))
        outcomes.append(outcome)
    assert outcomes[0] == outcomes[1]


def test_requests_that_have_ended_are_not_kept_until_their_deadline(make: Make) -> None:
    engine = make()
    for index in range(300):
        engine.add(make_request(f"r{index}", 4, deadline=1e6))
        engine.run_out()
    assert len(finished(engine)) == 300
    assert engine.scheduler._requests.num_deadlines <= 65


def test_of_many_deadlines_the_late_ones_end_and_the_next_one_is_known(make: Make) -> None:
    engine = make(max_num_seqs=1)
    engine.add(*(make_request(f"r{index}", 4, deadline=10.0 - index, max_tokens=99) for index in range(6)))
    engine.step()
    engine.now = 7.0
    engine.step()
    assert sorted(finished(engine)) == ["r3", "r4", "r5"]
    assert engine.scheduler.next_deadline() == 8.0


def test_nothing_is_watched_for_requests_that_have_ended(make: Make) -> None:
    engine = make()
    engine.add(*(make_request(f"r{i}", 30, [make_feature(f"x{i}", 9, 8)], ready=[]) for i in range(5)))
    engine.step()
    assert len(engine.scheduler._waiting.prefixes) > 0
    engine.scheduler.cancel([f"r{i}" for i in range(5)], "proxy")
    engine.step()
    assert len(engine.scheduler._waiting.prefixes) == 0


def test_a_waiting_request_whose_prefix_is_evicted_takes_hold_of_the_item_in_it(make: Make) -> None:
    cat, dog = make_feature("cat", 0, 8), make_feature("dog", 12, 4)
    engine = make(num_blocks=8, block_size=4, budget=64)
    publish(STORE, cat)
    engine.add(make_request("a", 13, [cat]))
    engine.run_out()
    engine.add(make_request("b", 20, [cat, dog], ready=[cat.mm_hash]))
    engine.step()
    assert engine.cache.references == 0
    engine.add(make_request("text", [9] * 30, max_tokens=2))
    engine.step()
    engine.step()
    assert engine.scheduler.num_waiting == 1
    assert engine.cache.references == 1


ITEMS, ROWS, SEQUENCES, NO_END = 16, 3, 8, 1 << 20
#: The logarithm of the number of requests, and nothing more, may show.
MAX_GROWTH = 1.5


def text_engine(running: int, waiting: int, capacity: int = 1) -> ModellessEngine:
    """`running` decoding requests of text, and `waiting` ones for which there is no slot."""
    sizes = {"num_blocks": 1 << 15, "block_size": 16, "budget": 4096, "max_model_len": 2 * NO_END}
    engine = ModellessEngine(MemoryStore(), max_num_seqs=running, capacity=capacity, **sizes)
    engine.add(
        *(make_request(f"text-{i}", [1, 1], max_tokens=NO_END, arrival=i) for i in range(running + waiting))
    )
    for _ in range(4):
        engine.step()
    return engine


def items_of(request: int) -> list[MMFeature]:
    return [make_feature(f"{request} {item}", 1 + ROWS * item, ROWS) for item in range(ITEMS)]


def full_engine(requests: int, *, stored: bool, reserve: int | None = None) -> ModellessEngine:
    """`requests` waiting requests of 16 items each beside eight running ones of text.

    `reserve` says for how many of them there is memory; `stored` whether their items are in the store.
    """
    memory = (requests if reserve is None else reserve) * ITEMS * ROWS * WIDTH * 4
    engine = text_engine(SEQUENCES, 0, memory)
    for index in range(requests):
        items = items_of(index)
        if stored:
            publish(engine.store, *items)
        ready = [item.mm_hash for item in items] if stored else ()
        prompt = [1] * (2 + ROWS * ITEMS)
        engine.add(
            make_request(
                f"r{index}", prompt, items, max_tokens=NO_END, arrival=SEQUENCES + index, ready=ready
            )
        )
    for _ in range(4):
        engine.step()
    return engine


SITUATIONS = {
    "embeddings": lambda requests: full_engine(requests, stored=False),
    "memory": lambda requests: full_engine(requests, stored=False, reserve=1),
    "a slot": lambda requests: full_engine(requests, stored=True),
}


def stepping(running: int, waiting: int) -> Callable[[], object]:
    """All that the engine's thread does in a step but the model and the metrics."""
    engine = text_engine(running, waiting)
    return lambda: (engine.step(), engine.scheduler.collect_stats())


@pytest.mark.parametrize("what", SITUATIONS)
def test_a_step_costs_as_much_with_256_waiting_requests_as_with_16(what: str) -> None:
    few, many = (
        operations(partial(SITUATIONS[what](requests).scheduler.schedule, 0.0)) for requests in (16, 256)
    )
    assert many < MAX_GROWTH * few


def test_an_item_that_comes_costs_as_much_with_256_waiting_requests_as_with_16() -> None:
    def coming(requests: int) -> int:
        full = full_engine(requests, stored=False)

        def come() -> None:
            full.scheduler.mark_ready([items_of(3)[5].mm_hash], 0.0)
            for _ in range(3):
                full.step()

        return operations(come)

    assert coming(256) < MAX_GROWTH * coming(16)


def test_a_step_of_text_costs_as_much_with_10_000_waiting_requests_as_with_16() -> None:
    few, many = (operations(stepping(8, waiting)) for waiting in (16, 10_000))
    assert many < MAX_GROWTH * few


def test_a_step_looks_at_no_more_waiting_requests_than_it_could_start(monkeypatch):
    texts = text_engine(8, 100)

    def all_of_them(queue: OrderedRequests[RequestState]) -> None:
        raise AssertionError("a copy of a queue costs more the longer it is")

    monkeypatch.setattr(OrderedRequests, "__iter__", all_of_them)
    texts.step()
    assert texts.scheduler.num_running == 8 and texts.scheduler.num_waiting == 100


def test_a_request_more_that_runs_costs_a_step_as_much_as_the_one_before() -> None:
    one, many, twice = (operations(stepping(running, 0)) for running in (1, 128, 256))
    assert twice - many < MAX_GROWTH * (many - one)


def test_the_core_loads_neither_torch_nor_grpc() -> None:
    code = "import sys, triptych.pd_worker.core.scheduler; sys.exit(len({'torch', 'grpc'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_twice_the_prompt_costs_the_engines_thread_no_more_when_it_comes(make: Make) -> None:
    engine = make(num_blocks=8000, max_model_len=100_000, budget=64)
    counts = []
    for size in (10_000, 10_000, 20_000):
        request = make_request(f"r{len(counts)}", [5] * size)
        engine.scheduler.check(request)
        counts.append(operations(partial(engine.scheduler.add, request, 0.0)))
        engine.scheduler.cancel([request.request_id], "proxy")
    assert counts[2] == counts[1]

"""What a step's scheduling costs does not depend on how many requests wait, whatever they wait for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest

from support.engine.engine_requests import WIDTH, ModellessEngine, make_feature, make_request, publish
from support.hostile.operations import operations
from triptych.base.types import MMFeature
from triptych.ec_connector.connectors.memory import MemoryStore
from triptych.pd_worker.core.admission import OrderedRequests
from triptych.pd_worker.core.request import RequestState

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

"""Steps as messages: what a rank makes of them is what rank 0's runner reads, and they carry deltas only."""

from __future__ import annotations

import random

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine.engine_requests import (
    FAR,
    ModellessEngine,
    make_cross,
    make_feature,
    make_request,
    publish,
)
from support.pd_ranks.views import step_view
from triptych.base.types import MMFeature
from triptych.ec_connector.connectors.memory_store import MemoryStore
from triptych.pd_worker.core.outputs import ModelRunnerOutput, SchedulerOutput
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.ranks.request_mirror import RequestMirror
from triptych.pd_worker.ranks.step_message import StepEncoder


class MirroredEngine(ModellessEngine):
    """A modelless engine that sends each of its steps to a mirror, and compares."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.encoder, self.mirror = StepEncoder(), RequestMirror(1)
        self.sizes: list[int] = []
        self.rng = random.Random(1)

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        packed = msgpack.packb(self.encoder.encode(output))
        self.sizes.append(len(packed))
        assert step_view(self.mirror.apply(msgpack.unpackb(packed))) == step_view(output)
        return super().run(output)

    def assert_forgotten(self) -> None:
        self.step()
        assert len(self.encoder) == len(self.mirror) == 0


def some_request(rng: random.Random, number: int, cross: bool, store: MemoryStore) -> EngineRequest:
    features: list[MMFeature] = []
    length = rng.randint(1, 30)
    if cross:
        features = [make_cross(f"item {rng.randint(0, 9)}", 9)]
    elif rng.random() < 0.7:
        runs = ((1, 2), (4, 3)) if rng.random() < 0.5 else None
        name = f"item {rng.randint(0, 4)} {runs}"
        features = [make_feature(name, rng.randint(0, 3), 8, runs=runs, atomic=rng.random() < 0.3)]
        length += 12
    publish(store, *features)
    request = make_request(
        f"r{number}",
        [rng.randint(0, 1) for _ in range(length)],
        features,
        max_tokens=rng.randint(1, 24),
        arrival=float(number),
        deadline=30.0 if rng.random() < 0.05 else FAR,
    )
    request.positions = torch.arange(length)[None] * 3
    request.position_delta = rng.randint(-4, 4)
    if rng.random() < 0.2:
        request.output_token_ids.extend(range(50, 50 + rng.randint(1, 5)))
    return request


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 30), cross=st.booleans(), swaps=st.booleans())
def test_a_rank_sees_every_step_of_random_schedules_as_rank_0_does(
    seed: int, cross: bool, swaps: bool
) -> None:
    rng, store = random.Random(seed), MemoryStore()
    engine = MirroredEngine(
        store,
        num_blocks=rng.randint(24, 36),
        max_model_len=80,
        max_num_seqs=rng.randint(1, 6),
        prefix_caching=rng.random() < 0.6,
        cross=cross,
        host_blocks=20 if swaps else 0,
        copy_fails=lambda: rng.random() < 0.2,
    )
    requests = [some_request(rng, number, cross, store) for number in range(10)]
    for _ in range(300):
        if requests and rng.random() < 0.5:
            engine.add(requests.pop())
        if rng.random() < 0.05:
            engine.scheduler.cancel([f"r{rng.randrange(10)}"], "proxy")
        engine.step(error=RuntimeError("x") if rng.random() < 0.02 else None)
        engine.now += 0.2
        if not requests and not engine.scheduler.num_running + engine.scheduler.num_waiting:
            break
    engine.assert_forgotten()


def test_a_prompt_is_sent_once_and_a_decode_step_costs_bytes_for_its_new_token_and_block() -> None:
    engine = MirroredEngine(MemoryStore(), num_blocks=600, max_model_len=2400, budget=512)
    engine.add(*(make_request(f"r{i}", range(i, i + 1024), max_tokens=40) for i in range(2)))
    engine.run_out()
    first, decoding = max(engine.sizes), engine.sizes[10:40]
    assert 2 * 4 * 1024 < first < 32 * 1024, "prompt and positions of one request, or of both"
    assert max(decoding) < 300, "two requests, no prompt and no block table among them"


@pytest.mark.parametrize("fault", ["layout", "blocks", "tokens", "number"])
def test_a_message_that_does_not_follow_those_before_it_is_refused(fault: str) -> None:
    engine = ModellessEngine(MemoryStore())
    engine.add(make_request("r", 5, max_tokens=4))
    encoder, mirror = StepEncoder(), RequestMirror(1)
    first = engine.step()
    mirror.apply(encoder.encode(first))
    message = encoder.encode(engine.step())
    number, start, *_ = chunk = message["chunks"][0]
    match fault:
        case "layout":
            message["layout"] = 99
        case "blocks":
            chunk[5] = 77
        case "tokens":
            chunk[7] = []
        case "number":
            chunk[0] = number + 1
    assert start == 5
    with pytest.raises((ValueError, KeyError)):
        mirror.apply(message)

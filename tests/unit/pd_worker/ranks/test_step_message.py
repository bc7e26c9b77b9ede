"""Steps as messages to ranks, and the ranks' reports."""

from __future__ import annotations

import os
import random
import threading

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
from triptych.base.ranks.channel import RankLost
from triptych.base.types import MMFeature
from triptych.ec_connector.base import ECConnectorOutput, FailedLoad
from triptych.ec_connector.connectors.memory import MemoryStore
from triptych.pd_worker.core.outputs import ModelRunnerOutput, SchedulerOutput
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.ranks.decoder_ranks import ProgressListener, ProgressWriter
from triptych.pd_worker.ranks.ranked_runner import check_same_step, merge_into
from triptych.pd_worker.ranks.request_mirror import RequestMirror
from triptych.pd_worker.ranks.step_message import StepEncoder, StepReport, read_report, report_of


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
def test_a_rank_sees_every_step_of_random_schedules_as_rank_0_does(seed, cross, swaps):
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


def test_a_report_says_what_the_rank_has_done() -> None:
    output = ModelRunnerOutput(
        swapped_out=True,
        swapped_in=False,
        sampled=[5],
        unprojected=frozenset({"k"}),
        non_finite=frozenset({2, 0}),
        batch_digest=-(1 << 62),
        ec_connector_output=ECConnectorOutput(
            fetched={"a": 0.5},
            loaded=["b"],
            failed=[FailedLoad("c", "gone", "d1", unreachable=True)],
            generations={"a": 7},
        ),
    )
    report = read_report(msgpack.unpackb(msgpack.packb(report_of(9, output))))
    assert report == StepReport(
        9, True, False, frozenset({"k"}), frozenset({0, 2}), -(1 << 62), output.ec_connector_output
    )


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("other", [True, False])
def test_copies_have_succeeded_when_they_have_on_all_ranks(own: bool, other: bool) -> None:
    output = ModelRunnerOutput(swapped_out=own, swapped_in=own)
    merge_into(output, [StepReport(1, True, True), StepReport(1, other, other)])
    assert output.swapped_out is output.swapped_in is (own and other)


def test_what_fails_on_any_rank_has_failed() -> None:
    output = ModelRunnerOutput(True, True, sampled=[4], unprojected=frozenset("a"), non_finite=frozenset({1}))
    reports = [
        StepReport(1, True, True, frozenset("b")),
        StepReport(1, True, True, non_finite=frozenset({3})),
    ]
    merge_into(output, reports)
    assert output.unprojected == {"a", "b"}
    assert output.non_finite == {1, 3}
    assert output.sampled == [4], "rank 0 alone samples"


def test_ranks_that_computed_something_else_end_the_worker() -> None:
    output = ModelRunnerOutput(batch_digest=5)
    check_same_step(3, output, [StepReport(3, True, True, batch_digest=5)])
    with pytest.raises(RankLost, match="rank 2 computed another batch"):
        reports = [StepReport(3, True, True, batch_digest=5), StepReport(3, True, True, batch_digest=6)]
        check_same_step(3, output, reports)
    with pytest.raises(RankLost, match="rank 1 reports step 2 in place of 3"):
        check_same_step(3, output, [StepReport(2, True, True, batch_digest=5)])


PATIENCE = 30.0


def test_a_write_wakes_the_listener_and_the_last_writers_end_ends_it() -> None:
    heard = threading.Semaphore(0)
    listener = ProgressListener(heard.release)
    writers = [ProgressWriter(listener.descriptor) for _ in range(2)]
    listener.handed_out()
    for writer in writers:
        writer.write()
        assert heard.acquire(timeout=PATIENCE)
    for writer in writers:
        writer.close()
    listener.join()
    assert not any(thread.name == "rank-progress" for thread in threading.enumerate())


def test_a_writer_never_blocks_and_a_listener_that_is_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    writer = ProgressWriter(writing)
    os.close(writing)
    for _ in range(100_000):  # more than a pipe holds
        writer.write()
    os.close(reading)
    writer.write()
    writer.close()

"""Ranks: messages of a step, and transfers of all of them."""

from __future__ import annotations

import os
import random
import threading
from dataclasses import dataclass, replace

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine.engine_requests import (
    FAR,
    ModellessEngine,
    finished,
    make_cross,
    make_feature,
    make_request,
    publish,
)
from support.engine.tight_engine import ROW_BYTES, serve, tight_requests
from support.pd_ranks.ranked_engine import RankedTightEngine
from support.pd_ranks.views import step_view
from triptych.base.config import MIB, PDConfig
from triptych.base.errors import ConfigError
from triptych.base.ranks.channel import RankLost
from triptych.base.types import MMFeature
from triptych.ec_connector.base import ECConnectorOutput, FailedLoad
from triptych.ec_connector.connectors.memory import MemoryStore
from triptych.ec_connector.metadata import Fetch, LoadId, TransferMetadata
from triptych.pd_worker.core.outputs import ModelRunnerOutput, SchedulerOutput
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.ranks.decoder_ranks import ProgressListener, ProgressWriter, collective_seconds
from triptych.pd_worker.ranks.ranked_runner import TransferMerger, check_same_step, merge_into
from triptych.pd_worker.ranks.request_mirror import RequestMirror
from triptych.pd_worker.ranks.share import decoder_threads_of_rank, load_share, share_of_rank
from triptych.pd_worker.ranks.step_message import StepEncoder, StepReport, read_report, report_of

PLAN = make_feature("a", 0, 3).plan
KEY = PLAN.mm_hash
NOTHING = ECConnectorOutput()


def fetched(seconds: float = 0.1, generation: int = 1) -> ECConnectorOutput:
    return ECConnectorOutput(fetched={KEY: seconds}, generations={KEY: generation})


def loaded(generation: int = 1) -> ECConnectorOutput:
    return ECConnectorOutput(loaded=[KEY], generations={KEY: generation})


def failed(generation: int = 1, reason: str = "gone") -> ECConnectorOutput:
    return ECConnectorOutput(failed=[FailedLoad(KEY, reason)], generations={KEY: generation})


@dataclass
class Merging:
    """Orders and reports in turn; `says` is the merged report in short."""

    merger: TransferMerger
    step: int = 0

    def order(self, *, fetch: int = 0, move: int = 0, drop: int = 0) -> None:
        self.step += 1
        self.merger.begin(
            TransferMetadata(
                self.step,
                fetches=(Fetch(PLAN, fetch),) if fetch else (),
                moves=(LoadId(KEY, move),) if move else (),
                drops=(LoadId(KEY, drop),) if drop else (),
            )
        )

    def says(self, *outputs: ECConnectorOutput) -> str:
        merged = self.merger.merge(outputs)
        generation = merged.generations.get(KEY, "")
        parts = [f"fetched {generation} in {seconds}" for seconds in merged.fetched.values()]
        parts += ["loaded" for _ in merged.loaded]
        parts += [f"failed {generation}: {failure.reason}" for failure in merged.failed]
        return "; ".join(parts)


@pytest.fixture
def two() -> Merging:
    return Merging(TransferMerger(2))


def test_an_item_is_fetched_once_it_is_on_all_ranks_and_takes_as_long_as_the_slowest(two: Merging) -> None:
    two.order(fetch=1)
    assert two.says(fetched(0.1), NOTHING) == ""
    assert two.says(NOTHING, NOTHING) == ""
    assert two.says(NOTHING, fetched(0.7)) == "fetched 1 in 0.7"


def test_an_item_is_loaded_once_it_is_on_all_ranks(two: Merging) -> None:
    two.order(fetch=1)
    two.says(fetched(), fetched())
    two.order(move=1)
    assert two.says(NOTHING, loaded()) == ""
    assert two.says(loaded(), NOTHING) == "loaded"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_on_one_rank_has_failed_once(two: Merging, rank: int) -> None:
    two.order(fetch=1)
    reports = [fetched(), fetched()]
    reports[rank] = failed()
    assert two.says(*reports) == "failed 1: gone"
    assert two.says(failed(), failed()) == "", "the other's failure is no news"
    two.order(drop=1, fetch=2)
    assert two.says(fetched(generation=1), fetched(generation=2)) == "", "of a load that was dropped"
    assert two.says(fetched(0.2, 2), NOTHING) == "fetched 2 in 0.2"


@pytest.mark.parametrize("order", ["before", "with", "after"])
def test_an_entry_whose_move_failed_elsewhere_is_given_to_the_scheduler_to_evict(two, order):
    """As loaded, without an entry of the scheduler's: never in the report that says that it has failed."""
    two.order(fetch=1)
    two.says(fetched(), fetched())
    two.order(move=1)
    match order:
        case "before":
            assert two.says(NOTHING, loaded()) == ""
            assert two.says(failed(), NOTHING) == "failed 1: gone"
        case "with":
            assert two.says(failed(), loaded()) == "failed 1: gone"
        case "after":
            assert two.says(failed(), NOTHING) == "failed 1: gone"
            assert two.says(NOTHING, loaded()) == "loaded"
            return
    two.order(drop=1)
    assert two.says(NOTHING, NOTHING) == "loaded"
    assert two.says(NOTHING, NOTHING) == ""


def test_an_entry_of_a_failed_move_is_the_schedulers_once_the_key_is_moved_again(two: Merging) -> None:
    two.order(fetch=1)
    two.says(fetched(), fetched())
    two.order(move=1)
    assert two.says(failed(), loaded()) == "failed 1: gone"
    two.order(drop=1, fetch=2)
    two.order(move=2)
    assert two.says(NOTHING, NOTHING) == "", "an eviction now would take the new entry"
    assert two.says(loaded(2), loaded(2)) == "loaded"


def test_a_move_outlives_the_drop_of_its_host_copy(two: Merging) -> None:
    two.order(fetch=1)
    two.says(fetched(), fetched())
    two.order(move=1)
    two.order(drop=1, fetch=2)
    assert two.says(loaded(1), fetched(0.5, 2)) == ""
    assert two.says(fetched(0.4, 2), loaded(1)) == "fetched 2 in 0.5; loaded"
    two.order(drop=2)
    assert len(two.merger) == 0


def engine_of(seed: int, rows: int, losses: float, ranks: int = 2) -> tuple[bool, RankedTightEngine]:
    """Whether all of the seed's requests end."""
    rng = random.Random(seed)
    engine = RankedTightEngine(
        MemoryStore(),
        capacity=rows * ROW_BYTES,
        num_blocks=rng.randint(10, 20),
        max_model_len=40,
        budget=rng.choice([3, 8, 16]),
        max_num_seqs=rng.randint(1, 5),
        prefix_caching=rng.random() < 0.5,
        ranks=ranks,
        seed=seed,
        losses=losses,
    )
    try:
        return serve(engine, rng, tight_requests(rng, rows, 8), limit=800), engine
    finally:
        if engine.idle:
            engine.losses = 0.0
            engine.assert_at_rest()
        engine.close()


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    rows=st.integers(6, 14),
    losses=st.sampled_from([0.0, 0.1, 0.3]),
    ranks=st.sampled_from([2, 3]),
)
def test_whatever_fails_on_single_ranks_all_requests_end_and_all_ranks_hold_the_same(
    seed: int, rows: int, losses: float, ranks: int
) -> None:
    ended, engine = engine_of(seed, rows, losses, ranks)
    assert ended, "requests wait for ever"
    assert len(finished(engine)) == 8


WORKER = PDConfig(
    kv_memory=64 * MIB,
    swap_memory=32 * MIB,
    encoder_cache_memory=16 * MIB,
    device_memory=512 * MIB,
    tensor_parallel=4,
)


def test_ranks_divide_keys_and_values_and_have_all_embeddings() -> None:
    share = share_of_rank(WORKER)
    assert (share.kv_memory, share.swap_memory) == (16 * MIB, 8 * MIB)
    assert share.encoder_cache_memory == 16 * MIB


@pytest.mark.parametrize(
    ("device", "memory"), [("cpu", 128 * MIB), ("cuda", 512 * MIB), ("cuda:1", 512 * MIB)]
)
def test_ranks_divide_the_memory_of_a_cpu_and_have_a_gpu_each(device: str, memory: int) -> None:
    assert share_of_rank(replace(WORKER, device=device)).device_memory == memory


def test_one_rank_has_all_of_it() -> None:
    alone = replace(WORKER, tensor_parallel=1)
    assert share_of_rank(alone) is alone


@pytest.mark.parametrize(("threads", "ranks", "each"), [(8, 2, 4), (3, 2, 1), (1, 2, 1), (8, 1, 8)])
def test_ranks_divide_the_threads(threads: int, ranks: int, each: int) -> None:
    config = PDConfig(threads=threads, tensor_parallel=ranks)
    assert decoder_threads_of_rank(config, hidden_size=4096) == each


@pytest.mark.parametrize("ranks", [0, 65])
def test_a_number_of_ranks_that_no_machine_has_is_refused_by_its_flag(ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"--tensor-parallel {ranks}: "):
        load_share(PDConfig(tensor_parallel=ranks), 0)


@pytest.mark.parametrize(("stall", "seconds"), [(4.0, 120.0), (60.0, 120.0), (300.0, 600.0)])
def test_a_rank_that_stands_still_is_found_before_a_collective_gives_up(stall: float, seconds: float) -> None:
    assert collective_seconds(stall) == seconds > stall
    assert collective_seconds(0) > 86400, "for ever, as --stall-timeout 0 says"


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

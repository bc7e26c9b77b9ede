"""Transfers of several ranks, merged: loaded when they are on all, failed with any, and nothing kept."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine.engine_requests import finished, make_feature
from support.engine.tight_engine import ROW_BYTES, serve, tight_requests
from support.pd_ranks.ranked_engine import RankedTightEngine
from triptych.base.config import MIB, PDConfig
from triptych.base.errors import ConfigError
from triptych.ec_connector.base import ECConnectorOutput, FailedLoad
from triptych.ec_connector.connectors.memory import MemoryStore
from triptych.ec_connector.metadata import Fetch, LoadId, TransferMetadata
from triptych.pd_worker.ranks.decoder_ranks import collective_seconds
from triptych.pd_worker.ranks.ranked_runner import TransferMerger
from triptych.pd_worker.ranks.share import decoder_threads_of_rank, load_share, share_of_rank

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

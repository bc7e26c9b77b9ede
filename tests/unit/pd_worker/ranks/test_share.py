"""What of its worker's memory and threads each rank has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from triptych.base.config import MIB, PDConfig
from triptych.base.errors import ConfigError
from triptych.pd_worker.ranks.decoder_ranks import collective_seconds
from triptych.pd_worker.ranks.share import decoder_threads_of_rank, load_share, share_of_rank

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

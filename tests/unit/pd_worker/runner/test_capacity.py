"""How many blocks, slots and snapshots the memory holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from triptych.base.config import MIB, PDConfig
from triptych.base.errors import ConfigError
from triptych.models.geometry import CrossGeometry, DecoderGeometry
from triptych.models.recurrent import StateShape
from triptych.pd_worker.core.kv_cache.state_slots import StateCopy
from triptych.pd_worker.runner.capacity import (
    StateCapacity,
    auto_states,
    block_bytes,
    cross_limits_of,
    max_model_len,
    num_host_blocks,
    num_kv_blocks,
    runner_options,
    state_capacity,
    uses_graphs,
)
from triptych.pd_worker.runner.state_pool import StatePool

GEOMETRY = DecoderGeometry(
    num_layers=4, num_heads=8, num_kv_heads=2, head_dim=64, hidden_size=512, vocab_size=1000,
    position_rows=3, max_position_embeddings=40960,
)  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "device", "used"),
    [
        ("off", "cuda", False),
        ("auto", "cpu", False),
        ("auto", "cuda", True),
        ("static", "cpu", True),
        ("static", "cuda", True),
        ("cuda", "cuda", True),
    ],
)
def test_decode_graphs_are_used_where_asked_for_and_by_themselves_on_cuda(mode, device, used):
    assert uses_graphs(PDConfig(decode_graphs=mode), torch.device(device)) is used


def test_ranks_have_no_cuda_graphs_and_asking_for_both_is_an_error_with_the_remedy() -> None:
    assert not uses_graphs(PDConfig(decode_graphs="auto", tensor_parallel=2), torch.device("cuda"))
    with pytest.raises(ConfigError, match="--tensor-parallel 2 .* --decode-graphs off, or one rank"):
        uses_graphs(PDConfig(decode_graphs="cuda", tensor_parallel=2), torch.device("cuda"))


def test_ranks_run_over_static_buffers_each_with_its_own() -> None:
    assert uses_graphs(PDConfig(decode_graphs="static", tensor_parallel=2), torch.device("cpu"))


def test_the_memory_is_divided_into_whole_blocks() -> None:
    config = PDConfig(kv_memory=3 * MIB, max_model_len=256)
    assert num_kv_blocks(config, GEOMETRY, torch.float32) == 3 * MIB // (2 * 4 * 16 * 2 * 64 * 4)


def test_memory_below_one_longest_request_is_an_error_with_the_sum() -> None:
    config = PDConfig(kv_memory=MIB, max_model_len=1024)
    with pytest.raises(ConfigError, match=r"64 blocks of 16 tokens x 64.0 KiB = 4.0 MiB; raise --kv-memory"):
        num_kv_blocks(config, GEOMETRY, torch.float32)


def test_the_default_length_is_the_checkpoints_up_to_a_limit() -> None:
    assert max_model_len(PDConfig(), GEOMETRY, torch.float32) == 32768
    assert max_model_len(PDConfig(max_model_len=100), GEOMETRY, torch.float32) == 100


def test_the_default_length_is_no_more_than_the_memory_holds() -> None:
    config = PDConfig(kv_memory=MIB)
    assert max_model_len(config, GEOMETRY, torch.float32) == 256
    assert num_kv_blocks(config, GEOMETRY, torch.float32) * config.block_size == 256


def test_a_length_above_the_checkpoints_positions_is_an_error() -> None:
    with pytest.raises(ConfigError, match="40960 positions"):
        max_model_len(PDConfig(max_model_len=50000), GEOMETRY, torch.float32)


def test_audio_that_never_fits_the_kv_memory_is_an_error_at_the_start() -> None:
    cross = CrossGeometry(num_layers=2, num_kv_heads=4, head_dim=16, width=64, max_rows=1500)
    config = PDConfig(block_size=16)
    assert cross_limits_of(config, cross, 94 + 28, 448, whole=True).max_rows == 1500
    with pytest.raises(ConfigError, match="1500 encoder positions and --max-model-len 448 need 122"):
        cross_limits_of(config, cross, 94 + 27, 448, whole=True)
    assert cross_limits_of(config, cross, 30, 448, whole=False).num_blocks == 30


def test_host_blocks_are_those_that_swap_memory_holds() -> None:
    geometry = DecoderGeometry(2, 4, 4, 16, 64, 100, 1, 512)
    nbytes = block_bytes(geometry, 16, torch.float32)
    assert num_host_blocks(PDConfig(swap_memory=3 * nbytes + 1), geometry, torch.float32) == 0
    swapping = PDConfig(preemption="swap", swap_memory=3 * nbytes + 1)
    assert num_host_blocks(swapping, geometry, torch.float32) == 3
    with pytest.raises(ConfigError, match="--swap-memory 10 B holds no KV block"):
        num_host_blocks(PDConfig(preemption="swap", swap_memory=10), geometry, torch.float32)


#: A slot of 1 MiB, half of it each.
SHAPES = (
    StateShape(("conv", 0, 0), (256, 1024), torch.bfloat16),
    StateShape(("recurrent", 0, 0), (128, 1024), torch.float32),
)
PLAIN = DecoderGeometry(2, 4, 4, 16, 64, 100, 1, 512)
RECURRENT = replace(PLAIN, states=SHAPES)


@pytest.mark.parametrize(
    ("flags", "capacity"),
    [
        ({"state_memory": 16 * MIB}, StateCapacity(4, 12, 0)),
        ({"state_memory": 4 * MIB}, StateCapacity(3, 1, 0)),
        ({"state_memory": MIB}, StateCapacity(1, 0, 0)),
        ({"state_memory": 16 * MIB, "prefix_caching": False}, StateCapacity(4, 0, 0)),
        ({"state_memory": 0}, StateCapacity(4, 252, 0)),
        ({"state_memory": 8 * MIB, "preemption": "swap", "swap_memory": 9 * MIB}, StateCapacity(4, 4, 2)),
    ],
)
def test_requests_have_slots_first_and_snapshots_what_is_left(flags: dict, capacity: StateCapacity) -> None:
    assert state_capacity(PDConfig(max_num_seqs=4, **flags), RECURRENT) == capacity


def test_a_model_without_recurrent_layers_costs_nothing() -> None:
    assert state_capacity(PDConfig(state_memory=1), PLAIN) is None


def test_memory_without_a_single_slot_is_refused_with_the_size_of_one() -> None:
    with pytest.raises(ConfigError, match=r"--state-memory 1023.0 KiB holds no state.*raise it to 1.0 MiB"):
        state_capacity(PDConfig(state_memory=MIB - 1024), RECURRENT)
    with pytest.raises(ConfigError, match=r"--swap-memory 3.0 MiB holds no state of 1.0 MiB"):
        state_capacity(PDConfig(preemption="swap", swap_memory=3 * MIB), RECURRENT)


def test_host_blocks_are_what_swap_memory_holds_beside_host_slots() -> None:
    config = PDConfig(max_num_seqs=1, preemption="swap", swap_memory=5 * MIB)
    assert num_host_blocks(config, RECURRENT, torch.float32) == 4 * MIB // block_bytes(
        RECURRENT, 16, torch.float32
    )


def test_states_get_a_quarter_of_what_is_left_and_no_more_than_two_slots_a_request() -> None:
    assert auto_states(40 * MIB, RECURRENT, 64) == 10 * MIB
    assert auto_states(1000 * MIB, RECURRENT, 8) == 16 * MIB
    assert auto_states(-MIB, RECURRENT, 8) == MIB


def test_recurrent_layers_run_without_decode_graphs() -> None:
    assert not uses_graphs(PDConfig(decode_graphs="auto"), torch.device("cuda"), RECURRENT)
    with pytest.raises(ConfigError, match="does not go with recurrent layers"):
        uses_graphs(PDConfig(decode_graphs="static"), torch.device("cpu"), RECURRENT)


def test_swapped_states_come_back_as_they_were() -> None:
    pool = StatePool(SHAPES, 2, 1, torch.device("cpu"))
    states = pool._slots
    for tensor in states.values():
        tensor[0] = 3
    pool.swap_out([StateCopy(0, 0)])
    for tensor in states.values():
        tensor[0] = 4
    pool.swap_in([StateCopy(0, 1)])
    assert all(bool((tensor[1] == 3).all()) for tensor in states.values())


def test_the_runner_has_slots_for_requests_and_snapshots() -> None:
    class Decoder:
        geometry, dtype, device = RECURRENT, torch.float32, torch.device("cpu")

    options = runner_options(PDConfig(max_num_seqs=4, state_memory=16 * MIB, kv_memory=MIB), Decoder())  # type: ignore[arg-type]
    assert (options["num_slots"], options["num_host_slots"]) == (16, 0)

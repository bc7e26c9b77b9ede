"""How many slots, snapshots and host slots the memory for recurrent states holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from triptych.base.config import MIB, PDConfig
from triptych.base.errors import ConfigError
from triptych.models.base import DecoderGeometry
from triptych.models.recurrent import StateShape
from triptych.pd_worker.core.kv_cache.state_slots import StateCopy
from triptych.pd_worker.runner.capacity import (
    StateCapacity,
    auto_states,
    block_bytes,
    num_host_blocks,
    runner_options,
    state_capacity,
    uses_graphs,
)
from triptych.pd_worker.runner.state_pool import StatePool

#: A slot of 1 MiB, half of it each.
SHAPES = (
    StateShape(("conv", 0, 0), (256, 1024), torch.bfloat16),
    StateShape(("recurrent", 0, 0), (128, 1024), torch.float32),
)
PLAIN = DecoderGeometry(2, 4, 4, 16, 64, 100, 1, 512)
GEOMETRY = replace(PLAIN, states=SHAPES)


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
    assert state_capacity(PDConfig(max_num_seqs=4, **flags), GEOMETRY) == capacity


def test_a_model_without_recurrent_layers_costs_nothing() -> None:
    assert state_capacity(PDConfig(state_memory=1), PLAIN) is None


def test_memory_without_a_single_slot_is_refused_with_the_size_of_one() -> None:
    with pytest.raises(ConfigError, match=r"--state-memory 1023.0 KiB holds no state.*raise it to 1.0 MiB"):
        state_capacity(PDConfig(state_memory=MIB - 1024), GEOMETRY)
    with pytest.raises(ConfigError, match=r"--swap-memory 3.0 MiB holds no state of 1.0 MiB"):
        state_capacity(PDConfig(preemption="swap", swap_memory=3 * MIB), GEOMETRY)


def test_host_blocks_are_what_swap_memory_holds_beside_host_slots() -> None:
    config = PDConfig(max_num_seqs=1, preemption="swap", swap_memory=5 * MIB)
    assert num_host_blocks(config, GEOMETRY, torch.float32) == 4 * MIB // block_bytes(
        GEOMETRY, 16, torch.float32
    )


def test_states_get_a_quarter_of_what_is_left_and_no_more_than_two_slots_a_request() -> None:
    assert auto_states(40 * MIB, GEOMETRY, 64) == 10 * MIB
    assert auto_states(1000 * MIB, GEOMETRY, 8) == 16 * MIB
    assert auto_states(-MIB, GEOMETRY, 8) == MIB


def test_recurrent_layers_run_without_decode_graphs() -> None:
    assert not uses_graphs(PDConfig(decode_graphs="auto"), torch.device("cuda"), GEOMETRY)
    with pytest.raises(ConfigError, match="does not go with recurrent layers"):
        uses_graphs(PDConfig(decode_graphs="static"), torch.device("cpu"), GEOMETRY)


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
        geometry, dtype, device = GEOMETRY, torch.float32, torch.device("cpu")

    options = runner_options(PDConfig(max_num_seqs=4, state_memory=16 * MIB, kv_memory=MIB), Decoder())  # type: ignore[arg-type]
    assert (options["num_slots"], options["num_host_slots"]) == (16, 0)

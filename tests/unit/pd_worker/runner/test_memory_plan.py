"""The plan of the memory, and the capacity that comes of it."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.engine.engine_cell import Checkpoint
from triptych.base.config import CPU_SHARE, GIB, MIB, PDConfig
from triptych.base.errors import ConfigError
from triptych.base.machine.device import CpuMemory, memory_of
from triptych.models.geometry import CrossGeometry, DecoderGeometry
from triptych.models.recurrent import StateShape
from triptych.pd_worker.attention.metadata import LAYOUT_VERSION, PagedKVCache
from triptych.pd_worker.core.kv_cache.state_slots import StateCopy
from triptych.pd_worker.runner import memory_profile
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
from triptych.pd_worker.runner.memory_plan import (
    MIN_EMBEDDINGS,
    WorkerMemory,
    WorkerNeeds,
    auto_embeddings,
    plan_worker_memory,
)
from triptych.pd_worker.runner.state_pool import StatePool

NEEDS = WorkerNeeds(
    held=8 * GIB, activations=2 * GIB, gathered=GIB, embeddings=GIB, swapped=0, block=MIB,
    max_kv=1000 * GIB,
)  # fmt: skip


def test_keys_and_values_get_what_the_rest_leaves_in_whole_blocks() -> None:
    plan = plan_worker_memory(40 * GIB + 5, NEEDS)
    assert plan.kv_memory == 28 * GIB
    assert plan.rest == 5
    assert "KV cache (--kv-memory)" in plan.table() and "28.0 GiB" in plan.table()


def random_plan(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.randrange(0, 5 * GIB) for _ in range(5)]
    needs = WorkerNeeds(*sizes, block=draw.randrange(1, MIB), max_kv=GIB)
    try:
        plan = plan_worker_memory(draw.randrange(0, 30 * GIB), needs, draw.choice([0, 0, GIB // 2]))
    except ConfigError:
        return
    assert plan.rest >= 0
    assert needs.block <= plan.kv_memory <= GIB
    assert plan.kv_memory % needs.block == 0 or plan.kv_memory == GIB // 2


def test_no_plan_is_above_its_budget_or_above_what_requests_can_use() -> None:
    for seed in range(200):
        random_plan(seed)


def test_what_does_not_fit_is_refused_with_the_numbers_and_the_flag() -> None:
    with pytest.raises(
        ConfigError, match=r"nothing is left for the KV cache(.|\n)*--device-memory(.|\n)*8.0 GiB"
    ):
        plan_worker_memory(12 * GIB, NEEDS)
    with pytest.raises(
        ConfigError, match=r"needs 17.0 GiB and has 16.0 GiB: lower --kv-memory(.|\n)*-1.0 GiB"
    ):
        plan_worker_memory(16 * GIB, NEEDS, 5 * GIB)
    assert plan_worker_memory(17 * GIB, NEEDS, 5 * GIB).rest == 0


def test_buffers_that_the_machine_has_no_room_for_are_refused() -> None:
    needs = replace(NEEDS, host=2 * GIB)
    assert (
        "buffers of the host, beside that" in plan_worker_memory(40 * GIB, needs, host_free=2 * GIB).table()
    )
    with pytest.raises(
        ConfigError, match="need 2.0 GiB and 1.0 GiB are available: lower --encoder-cache-mem"
    ):
        plan_worker_memory(40 * GIB, needs, host_free=GIB)


class FakeMemory:
    """A device of `size` bytes, of which this process holds `held` and a step takes `step` more."""

    share = 0.5

    def __init__(self, size: int, held: int, step: int, others: int = 0) -> None:
        self._size, self._held, self._step, self._others = size, held, step, others
        self.resets = 0

    def free(self) -> int:
        return self._size - self._held - self._others

    def used(self) -> int:
        return self._held

    def reset_peak(self) -> None:
        self.resets += 1

    def peak(self) -> int:
        assert self.resets == 1, "a peak of before would count"
        return self._held + self._step


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return Checkpoint.open("qwen3_vl")


def _config(**flags: int) -> PDConfig:
    given = {"max_model_len": 256, "max_num_seqs": 4, "encoder_cache_memory": MIB} | flags
    return PDConfig(**given)  # type: ignore[arg-type]


def test_a_step_is_run_and_what_it_takes_is_not_given_away(checkpoint: Checkpoint) -> None:
    decoder, config = checkpoint.decoder, _config(max_num_batched_tokens=64)
    quiet = memory_profile.size_kv_memory(config, decoder, FakeMemory(64 * MIB, 8 * MIB, 0))
    hungry = memory_profile.size_kv_memory(config, decoder, FakeMemory(64 * MIB, 8 * MIB, 27 * MIB))
    assert quiet.budget == hungry.budget == 8 * MIB + 28 * MIB
    written = 64 // config.block_size * quiet.needs.block
    assert hungry.needs.activations == 27 * MIB - written
    assert hungry.kv_memory < quiet.kv_memory == quiet.needs.max_kv


@pytest.mark.parametrize(
    ("left", "maximum", "found"),
    [
        (80 * GIB, 100 * GIB, 10 * GIB),
        (80 * GIB, 3 * GIB, 3 * GIB),
        (GIB, 100 * GIB, 128 * MIB),
        (100 * MIB, 100 * GIB, MIN_EMBEDDINGS),
        (-GIB, 100 * GIB, MIN_EMBEDDINGS),
    ],
)
def test_embeddings_get_a_part_of_what_is_left_and_no_more_than_requests_can_use(left, maximum, found):
    assert auto_embeddings(left, maximum) == found


def test_what_embeddings_get_is_in_the_plan_and_not_the_kv_caches(checkpoint: Checkpoint) -> None:
    memory = FakeMemory(2 * GIB, 8 * MIB, 0)
    flags = {"encoder_cache_memory": 0, "max_model_len": 4096, "max_num_seqs": 4096}
    plan = memory_profile.size_kv_memory(_config(**flags), checkpoint.decoder, memory)
    left = plan.budget - (plan.needs.fixed - plan.needs.embeddings)
    assert plan.needs.embeddings == left // 8 > MIN_EMBEDDINGS
    assert plan.needs.fixed + plan.kv_memory + plan.rest == plan.budget
    assert 0 <= plan.rest < 2 * plan.needs.block


def test_copies_of_embeddings_that_were_found_count_in_the_hosts_memory_of_an_accelerator() -> None:
    needs = WorkerNeeds(0, 0, 0, 0, 0, MIB, GIB, host=MIB, copies_on_host=True)
    assert needs.with_embeddings(3 * MIB).host == 4 * MIB
    assert replace(needs, copies_on_host=False).with_embeddings(3 * MIB).host == MIB


def test_the_mask_of_a_late_chunk_of_the_longest_prompt_counts_where_keys_are_gathered(checkpoint):
    def gathered(backend: str, tokens: int) -> int:
        config = _config(max_model_len=4096, max_num_batched_tokens=tokens, max_num_seqs=1)
        config = replace(config, attention_backend=backend)
        return memory_profile.needs_of(config, checkpoint.decoder, 0, 0).gathered

    assert gathered("sdpa", 128) - gathered("sdpa", 64) == 64 * 4096 * 5
    assert gathered("cpu", 128) == 0


def test_what_decode_graphs_keep_is_in_the_plan_and_not_the_kv_caches(checkpoint: Checkpoint) -> None:
    """On a CPU that is a spare block and their tables."""

    def planned(mode: str) -> WorkerMemory:
        config = replace(_config(max_num_seqs=64), decode_graphs=mode)
        return memory_profile.size_kv_memory(config, checkpoint.decoder, FakeMemory(64 * MIB, 8 * MIB, 0))

    plain, plan = planned("off"), planned("static")
    assert plain.needs.graphs == 0 and plan.needs.graphs > plan.needs.block
    assert "decode graphs" in plan.table() and "decode graphs" not in plain.table()
    assert plan.needs.fixed + plan.kv_memory + plan.rest == plan.budget and plan.rest >= 0


def test_the_pool_of_cuda_graphs_counts_beside_steps_without_a_graph(checkpoint):
    config = replace(_config(max_num_batched_tokens=64), decode_graphs="cuda")
    needs = memory_profile.needs_of(config, checkpoint.decoder, 0, 64 * MIB)
    static = memory_profile.needs_of(replace(config, decode_graphs="static"), checkpoint.decoder, 0, 64 * MIB)
    assert needs.graphs - static.graphs >= 4 * MIB, "four tokens of the 64 that were measured"


def test_a_budget_that_is_given_counts_and_not_what_is_free_now(checkpoint: Checkpoint) -> None:
    full = FakeMemory(64 * MIB, 8 * MIB, 0, others=56 * MIB)
    plan = memory_profile.size_kv_memory(_config(device_memory=32 * MIB), checkpoint.decoder, full)
    assert plan.budget == 32 * MIB and plan.kv_memory == plan.needs.max_kv


@pytest.mark.parametrize(
    "family", ["qwen3_vl", "qwen2_5_vl", "llava", "whisper", "bart", "mbart", "t5", "trocr"]
)
def test_the_longest_batch_of_every_family_runs_for_real_on_a_cpu(family: str) -> None:
    decoder = Checkpoint.open(family).decoder
    memory = memory_of(decoder.device)
    assert isinstance(memory, CpuMemory) and memory.share == CPU_SHARE
    plan = memory_profile.size_kv_memory(PDConfig(encoder_cache_memory=MIB), decoder, memory)
    assert plan.needs.held > 10 * MIB, "the process as it is"
    assert 0 < plan.kv_memory <= plan.needs.max_kv
    assert plan.kv_memory % plan.needs.block == 0


_PEAK = """
import torch
from triptych.base.machine.device import CpuMemory
memory, much = CpuMemory(), 48 << 20
memory.reset_peak()
before = memory.used()
large = torch.ones(64 << 20, dtype=torch.uint8)
assert memory.used() - before > much
del large
assert memory.peak() - before > much
memory.reset_peak()
assert memory.peak() - before < much
assert memory.free() > 0
"""


def test_the_peak_of_a_process_is_counted_by_the_kernel_and_anew_after_a_reset() -> None:
    # In a process of its own: threads that other tests have left here allocate memory, too.
    done = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_what_triton_compiles_for_decodes_has_run_before_the_first_request(checkpoint, monkeypatch):
    decoder, seen = checkpoint.decoder, []
    forward = decoder.forward

    def noted(embeds: Any, positions: Any, merged: Any, attention: Any, **inputs: Any) -> torch.Tensor:
        seen.append((attention.num_decodes, attention.backend))
        attention.backend = "sdpa"
        return forward(embeds, positions, merged, attention, **inputs)

    monkeypatch.setattr(decoder, "forward", noted)
    monkeypatch.setattr(memory_profile, "backend_on", lambda *_: "triton")
    memory_profile.activation_bytes(PDConfig(max_num_seqs=8), decoder, CpuMemory())
    assert seen == [(1, "triton"), (8, "triton")]


def test_a_large_cache_on_a_cpu_takes_memory_as_it_is_used() -> None:
    memory = CpuMemory()
    before = memory.used()
    cache = PagedKVCache(
        num_layers=2, num_blocks=1 << 14, block_size=16, num_kv_heads=4, head_dim=64,
        dtype=torch.bfloat16, device=torch.device("cpu"),
    )  # fmt: skip
    assert sum(tensor.nbytes for tensor in (*cache.keys, *cache.values)) == 512 * MIB
    assert memory.used() - before < 64 * MIB
    cache.write(1, torch.tensor([5, 99999]), torch.ones(2, 4, 64).bfloat16(), torch.ones(2, 4, 64).bfloat16())
    assert cache.keys[1].flatten(0, 1)[5].sum() == 256
    assert cache.keys[1].flatten(0, 1)[6].sum() == cache.keys[0].flatten(0, 1)[5].sum() == 0


def small_cache() -> PagedKVCache:
    return PagedKVCache(
        num_layers=2, num_blocks=1 << 10, block_size=16, num_kv_heads=4, head_dim=64,
        dtype=torch.bfloat16, device=torch.device("cpu"),
    )  # fmt: skip


def test_a_cache_on_a_cpu_asks_for_huge_pages() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("a kernel without them")
    cache = small_cache()
    address, flags, inside = cache.keys[1].data_ptr(), "", False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if mapping := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(mapping[1], 16) <= address < int(mapping[2], 16)
        elif line.startswith("VmFlags:") and inside:
            flags = line
    assert "hg" in flags.split()


def test_another_layout_of_the_cache_is_another_version() -> None:
    """Blocks of one head side by side on a CPU; elsewhere the heads of a token."""
    cache = small_cache()
    strides = (16 * 64, 64, (1 << 10) * 16 * 64, 1)
    assert {tensor.stride() for tensor in (*cache.keys, *cache.values)} == {strides} and LAYOUT_VERSION == 1


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

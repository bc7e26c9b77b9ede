"""What of a worker's memory keys and values get, by fakes and by a real tiny decoder on a CPU."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from support.engine.engine_cell import Checkpoint
from triptych.base.config import CPU_SHARE, GIB, MIB, PDConfig
from triptych.base.errors import ConfigError
from triptych.base.machine.device import CpuMemory, memory_of
from triptych.pd_worker.runner import memory_profile
from triptych.pd_worker.runner.memory_plan import (
    MIN_EMBEDDINGS,
    WorkerMemory,
    WorkerNeeds,
    auto_embeddings,
    plan_worker_memory,
)

NEEDS = WorkerNeeds(
    held=8 * GIB, activations=2 * GIB, gathered=GIB, embeddings=GIB, swapped=0, block=MIB,
    max_kv=1000 * GIB,
)  # fmt: skip


def test_keys_and_values_get_what_the_rest_leaves_in_whole_blocks() -> None:
    plan = plan_worker_memory(40 * GIB + 5, NEEDS)
    assert plan.kv_memory == 28 * GIB
    assert plan.rest == 5
    assert "KV cache (--kv-memory)" in plan.table() and "28.0 GiB" in plan.table()


@pytest.mark.parametrize("seed", range(200))
def test_no_plan_is_above_its_budget_or_above_what_requests_can_use(seed: int) -> None:
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
    ("left", "most", "found"),
    [
        (80 * GIB, 100 * GIB, 10 * GIB),
        (80 * GIB, 3 * GIB, 3 * GIB),
        (GIB, 100 * GIB, 128 * MIB),
        (100 * MIB, 100 * GIB, MIN_EMBEDDINGS),
        (-GIB, 100 * GIB, MIN_EMBEDDINGS),
    ],
)
def test_embeddings_get_a_part_of_what_is_left_and_no_more_than_requests_can_use(left, most, found):
    assert auto_embeddings(left, most) == found


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
    from triptych.pd_worker.attention.paged_kv_cache import PagedKVCache

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

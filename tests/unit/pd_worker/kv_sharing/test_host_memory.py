"""Host memory of blocks on their way to and from the store is in the worker's memory plan."""

from __future__ import annotations

from typing import Any

import pytest

from support.engine.engine_cell import Checkpoint
from triptych.base.config import GIB, MIB, PDConfig
from triptych.pd_worker.runner import memory_profile
from triptych.pd_worker.runner.memory_plan import WorkerNeeds, plan_worker_memory


def shared(**flags: Any) -> int:
    config = PDConfig(max_model_len=512, share_memory=64 * MIB, **flags)
    return memory_profile.needs_of(config, Checkpoint.open("qwen3_vl").decoder, 0, 0).shared


@pytest.mark.parametrize("flags", [{"share_prefixes": "on"}, {"role": "prefill"}, {"role": "decode"}])
def test_it_counts_where_blocks_are_shared(flags: dict[str, str]) -> None:
    assert shared(**flags) == 64 * MIB
    assert shared() == 0


def test_the_kv_cache_gets_what_it_leaves() -> None:
    needs = WorkerNeeds(GIB, GIB, 0, GIB, 0, MIB, 1000 * GIB, shared=GIB)
    plan = plan_worker_memory(10 * GIB, needs)
    assert plan.kv_memory == 6 * GIB
    assert "shared blocks (--share-memory)" in plan.table()

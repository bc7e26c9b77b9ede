"""`tests/gpu` and `benchmarks/gpu` of encoder graphs on a CPU: plain calls over the same buffers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from support.encoder_graphs.adapters import ADAPTERS, Adapter
from triptych.base.machine.graphs import EagerStatic

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[3]
QUICK = ("t5", "two_towers")
EACH = [
    pytest.param(adapter, id=adapter.name, marks=() if adapter.name in QUICK else pytest.mark.slow)
    for adapter in ADAPTERS
]


@pytest.fixture(scope="module")
def gpu_tests() -> ModuleType:
    path = ROOT / "tests" / "gpu" / "test_encoder_graphs_gpu.py"
    spec = importlib.util.spec_from_file_location("encoder_graphs_gpu", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.DEVICE, module.backend = "cpu", EagerStatic  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("adapter", EACH)
def test_the_gpu_tests_hold_for_plain_calls(gpu_tests: ModuleType, adapter: Adapter) -> None:
    gpu_tests.test_padded_replays_equal_the_ordinary_call_for_each_number_of_items_at_each_budget(adapter)
    gpu_tests.test_a_replay_follows_from_its_items_alone_and_what_it_gave_stays(adapter)
    gpu_tests.test_what_runs_between_two_replays_changes_neither(adapter)
    gpu_tests.test_in_half_precision_a_replay_is_as_near_to_fp32_as_the_ordinary_call(adapter, torch.bfloat16)
    with pytest.raises(AssertionError, match="the tower was called"):
        gpu_tests.test_a_replay_runs_no_code_of_the_tower(adapter)

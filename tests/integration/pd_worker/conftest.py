"""One tiny checkpoint for all tests of this folder; small tensors: one thread is quickest."""

from __future__ import annotations

import pytest
import torch

from support.engine.engine_cell import Checkpoint


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    return Checkpoint.open("qwen3_vl")

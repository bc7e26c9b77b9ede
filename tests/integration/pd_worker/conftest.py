"""One tiny checkpoint for all tests of this folder; small tensors: one thread is quickest."""

from __future__ import annotations

import pytest

from support.engine.engine_cell import Checkpoint


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    return Checkpoint.open("qwen3_vl")

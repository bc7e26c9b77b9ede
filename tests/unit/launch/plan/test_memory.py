"""Whether a cluster fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.errors import ConfigError
from triptych.launch.plan.memory import MemoryPlan, check_fits, weight_bytes


def test_a_plan_that_fits_is_accepted():
    check_fits(MemoryPlan((("a", 1), ("b", 2))), 3)
    with pytest.raises(ConfigError, match="needs 3 B"):
        check_fits(MemoryPlan((("a", 1), ("b", 2))), 2)


def test_a_broken_weight_file_is_told(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ConfigError, match="fetch the checkpoint again"):
        weight_bytes(tmp_path, "float32")

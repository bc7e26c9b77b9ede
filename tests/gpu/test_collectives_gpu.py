"""The collectives of tensor parallelism over NCCL, a CUDA device for each rank; never run so far."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.parallel.ranks import start_ranks

#: NCCL takes no two ranks on one device.
SIZES = [size for size in (1, 2, 4, 8) if size <= torch.cuda.device_count()]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", SIZES)
def test_sums_least_values_and_gathered_columns_are_right_on_every_device(size: int, tmp_path: Path) -> None:
    start_ranks(size, tmp_path, "nccl", timeout=200)

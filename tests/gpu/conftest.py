"""These tests need a CUDA device; elsewhere they are not even collected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from triptych.base.machine.device import Device

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


#: Seconds of a test: the first of a process compiles kernels, and makes graphs.
_TIMEOUT = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longer than elsewhere, and a warning of CUDA, Triton or a driver of the day fails no test."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(_TIMEOUT))
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def exact_matmul() -> Iterator[None]:
    """fp32 products in fp32: TF32 has 10 bits of mantissa."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    # As in a worker: also for tests that load no checkpoint.
    Device.of(torch.device("cuda", 0)).open()
    # Else the programs of all tests would count towards torch's limit for one function.
    torch.compiler.reset()
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before

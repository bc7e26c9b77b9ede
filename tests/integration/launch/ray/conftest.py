"""Ray of several nodes, for the tests of one file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.data.checkpoints import build_checkpoint
from support.processes.ray_nodes import RayNodes, ray_nodes


@pytest.fixture(scope="module")
def model() -> Path:
    return build_checkpoint("qwen3_vl")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RayNodes]:
    """A head that has room for the workers of one test; other nodes are added by the tests."""
    with ray_nodes(tmp_path_factory.mktemp("ray"), cpus=6) as started:
        yield started

"""Clusters to break, and the answers that must come all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.chaos import faults
from support.data.checkpoints import build_checkpoint
from support.data.traffic import STREAM_TOKENS, Case, expected, mixed_cases
from support.processes.cluster import Cluster, running_cluster

#: Small steps, so that prefill and streams last long enough to be met.
SLOW = ("--max-num-batched-tokens", "64", "--encoder-batch-patches", "1")


@pytest.fixture(scope="session")
def slow_steps() -> tuple[str, ...]:
    return SLOW


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint("qwen3_vl", tmp_path_factory.mktemp("chaos") / "qwen3_vl")


@pytest.fixture(scope="session")
def cases() -> list[Case]:
    return mixed_cases(40, seed=15, sizes=((160, 160), (128, 192)))


@pytest.fixture(scope="session")
def reference(checkpoint: Path, cases: list[Case]) -> list[Any]:
    return expected(checkpoint, cases, STREAM_TOKENS)


@pytest.fixture(scope="session")
def shared_cluster(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One of each, for tests that leave it whole; each asks the cases with a `cache_salt` of its own."""
    words = ("--threads", "1", "--max-queue", "100", *SLOW)
    folder = tmp_path_factory.mktemp("shared")
    environment = faults.gated(folder) | faults.ordered(folder / "faults")
    with running_cluster(checkpoint, folder, *words, environment=environment) as cluster:
        yield cluster


@pytest.fixture
def start(checkpoint: Path, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Starts a cluster that ends with the test."""
    with ExitStack() as stack:

        def started(*words: str, environment: dict[str, str]) -> Cluster:
            run = running_cluster(
                checkpoint, tmp_path / "run", "--threads", "1", *words, environment=environment
            )
            return stack.enter_context(run)

        yield started


@pytest.fixture
def make_cluster(start: Callable[..., Cluster], tmp_path: Path) -> Callable[..., Cluster]:
    """Starts one of so many workers in each pool, whose engines stop at gates."""

    def made(workers: int, *words: str) -> Cluster:
        pools = ("--encoders", str(workers), "--pd-workers", str(workers))
        return start(*pools, *words, environment=faults.gated(tmp_path / "run"))

    return made

"""One real cluster for all attacks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.attacks import MODEL, Target
from support.checkpoints import build_checkpoint
from support.cluster import start_cluster


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    words = ("--served-model-name", MODEL, "--threads", "1", "--max-body", "16MiB")
    cluster = start_cluster(
        build_checkpoint("qwen3_vl"), tmp_path_factory.mktemp("attacked"), *words, "--log-level", "info"
    )
    try:
        target = Target(cluster)
        target.remember()
        yield target
    finally:
        cluster.stop()


@pytest.fixture
def target(untouched: Target) -> Iterator[Target]:
    """The cluster to attack; after the test it has to be as it was."""
    yield untouched
    untouched.unharmed()

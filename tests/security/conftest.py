"""One real cluster for all attacks, and one that asks for API keys."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.data.checkpoints import build_checkpoint
from support.hostile.attacks import MODEL, Target
from support.hostile.guarded import Guarded, guarded_cluster
from support.processes.cluster import running_cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Who asks first for a cluster waits for its start."""
    for item in items:
        if {"target", "guarded"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    words = ("--served-model-name", MODEL, "--threads", "1", "--max-body", "16MiB", "--log-level", "info")
    folder = tmp_path_factory.mktemp("attacked")
    with running_cluster(build_checkpoint("qwen3_vl"), folder, *words) as cluster:
        target = Target(cluster)
        target.remember()
        yield target


@pytest.fixture
def target(untouched: Target) -> Iterator[Target]:
    """The cluster to attack; after the test it has to be as it was."""
    yield untouched
    untouched.unharmed()


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A real cluster (store, proxy, encoder, PD worker; tiny Qwen3-VL) that asks for keys.

    Tenants `alice` and `bob` have no limits, `limited` has two requests a minute. Its internal gRPC has
    the token `support.hostile.guarded.TOKEN`; the proxy's /metrics has a port of its own. Shared by all tests
    of the session: leave it at rest (`support.chaos.rest.assert_at_rest`), and kill none of its processes.
    """
    with guarded_cluster(tmp_path_factory.mktemp("guarded")) as running:
        yield running

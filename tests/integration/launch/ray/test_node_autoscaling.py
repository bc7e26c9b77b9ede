"""Ray's autoscaler adds nodes for encoders that have no room, and takes them away again."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from support.data.oracle import assert_exact
from support.data.traffic import ask_all, expected, mixed_cases
from support.processes.cluster import Cluster, start_cluster, wait_for
from support.processes.ray_autoscaler import autoscaled_ray
from support.processes.ray_nodes import ENVIRONMENT, TcpStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

POOLS = """
[proxy]
num_cpus = 0.1
[encoder]
num_cpus = 1
resources = { encoder_node = 1 }
"""


def _nodes(address: str) -> int:
    """Nodes that live."""
    from ray._raylet import GcsClient

    return sum(node.state == 0 for node in GcsClient(address).get_all_node_info().values())


async def test_nodes_follow_the_encoders_from_none_and_back(tmp_path: Path, model: Path, monkeypatch):
    for name, value in (ENVIRONMENT | {"HOME": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "pools.toml").write_text(POOLS)
    (tmp_path / "token").write_text("t" * 32)
    store = TcpStore(tmp_path / "store")
    try:
        with autoscaled_ray(tmp_path, {"CPU": 2}, {"CPU": 1, "encoder_node": 1}, 2) as address:
            words = (
                *("--launcher", "ray", "--address", address, "--store", store.url, "--insecure"),
                *("--internal-token-file", str(tmp_path / "token")),
                *(
                    "--ray-resources",
                    str(tmp_path / "pools.toml"),
                    "--encoders",
                    "0..2",
                    "--scale-window",
                    "5",
                ),
            )
            cluster = await asyncio.to_thread(
                start_cluster, model, tmp_path / "run", *words, environment={"TRIPTYCH_INTERNAL_TOKEN": ""}
            )
            try:
                await _scale(cluster, address, model)
            finally:
                assert await asyncio.to_thread(cluster.stop) == 0
    finally:
        store.stop()
    assert not os.path.exists(tmp_path / ".ray")


async def _scale(cluster: Cluster, address: str, model: Path) -> None:
    assert _nodes(address) == 1
    cases = mixed_cases(4, seed=11)
    answers = await ask_all(cluster.url, cases, 64, model="qwen3_vl")
    assert_exact(expected(model, cases, 64), [answer.token_ids for answer in answers])
    # An encoder has no room on the head.
    assert _nodes(address) > 1
    await asyncio.to_thread(wait_for, "no node but the head", lambda: _nodes(address) == 1)
    assert [worker.pool for worker in cluster.workers()] == ["pd"]

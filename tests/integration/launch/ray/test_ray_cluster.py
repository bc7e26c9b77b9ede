"""Clusters on a Ray of several nodes: what is lost, who goes on, and what is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.chaos.rest import assert_at_rest
from support.chaos.stages import hold
from support.data.oracle import MIN_DISTINCT, assert_exact
from support.data.traffic import Case, ask_all, expected, mixed_cases
from support.processes.cluster import Cluster, wait_for
from support.processes.processes import lives, survivors
from support.processes.ray_nodes import RayNodes, node_of, until_registered
from support.ranks.groups import children
from triptych.registry.registry import Registry
from triptych.store.embedding_store import EmbeddingStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TOKENS, LONG = 64, 120
#: The proxy, and with it its clients' connections, on the head; workers of a pool on different nodes.
APART = """
[proxy]
resources = { "node:__internal_head__" = 0.001 }
[encoder]
strategy = "SPREAD"
[pd]
strategy = "SPREAD"
"""


def _referenced(model: Path, seed: int, count: int, tokens: int) -> tuple[list[Case], list[Any]]:
    """Mixed requests and the answers of generate to them, of those whose answers say something."""
    cases = mixed_cases(2 * count, seed=seed)
    pairs = zip(cases, expected(model, cases, tokens), strict=True)
    telling = [(case, one) for case, one in pairs if len(set(one.token_ids)) >= MIN_DISTINCT][:count]
    assert len(telling) == count
    return [case for case, _ in telling], [one for _, one in telling]


async def _exact(cluster: Cluster, model: Path, seed: int, count: int = 3) -> None:
    """Mixed requests are answered as by generate."""
    cases, references = _referenced(model, seed, count, TOKENS)
    answers = await ask_all(cluster.url, cases, TOKENS, model="qwen3_vl")
    assert_exact(references, [answer.token_ids for answer in answers])


def _generated(cluster: Cluster) -> float:
    return cluster.total("pd", "vllm:generation_tokens_total")


async def _meanwhile(cluster: Cluster, model: Path, seed: int, fault) -> None:
    """Requests that are under way while `fault` happens, and some after it, are answered as by generate."""
    cases, references = _referenced(model, seed, 3, LONG)
    before = _generated(cluster)
    running = asyncio.create_task(ask_all(cluster.url, cases, LONG, model="qwen3_vl"))
    await hold("first tokens", lambda: _generated(cluster) > before or running.done())
    assert not running.done()
    await asyncio.to_thread(fault)
    answers = await running
    assert_exact(references, [answer.token_ids for answer in answers])
    await _exact(cluster, model, seed + 1, count=2)


async def test_deaths_of_services_actors_and_nodes_lose_no_request(nodes: RayNodes, model, tmp_path):
    spare = nodes.add(4)
    (tmp_path / "pools.toml").write_text(APART)
    words = ("--encoders", "2", "--pd-workers", "2", "--ray-resources", str(tmp_path / "pools.toml"))
    cluster = nodes.start_cluster(model, tmp_path / "run", *words)
    try:
        await _exact(cluster, model, seed=1)
        await _meanwhile(cluster, model, 10, lambda: cluster.kill("pd-0"))
        await asyncio.to_thread(until_registered, cluster, "pd", 2)
        actor = node_of(cluster, "pd-1")
        await _meanwhile(cluster, model, 20, lambda: os.kill(actor, signal.SIGKILL))
        await asyncio.to_thread(wait_for, "another actor", lambda: node_of(cluster, "pd-1") != actor)
        await asyncio.to_thread(until_registered, cluster, "pd", 2)
        encoder = node_of(cluster, "encoder-0")
        await _meanwhile(cluster, model, 30, lambda: os.kill(encoder, signal.SIGKILL))
        await _meanwhile(cluster, model, 40, lambda: nodes.kill(spare))
        nodes.add(4)
        await asyncio.to_thread(until_registered, cluster, "pd", 2)
        await asyncio.to_thread(until_registered, cluster, "encoder", 2)
        await _exact(cluster, model, seed=50)
    finally:
        assert cluster.stop() == 0
    assert nodes.actors() == set()


async def _without_a_rank(cluster: Cluster, model: Path, pool: str, seed: int) -> None:
    """The other rank of the pool's worker is killed: nothing is lost, and both ranks start anew."""
    leader = cluster.pid(f"{pool}-0")
    (other,) = children(leader)
    await _meanwhile(cluster, model, seed, lambda: os.kill(other, signal.SIGKILL))
    await asyncio.to_thread(wait_for, f"another {pool} worker", lambda: cluster.pid(f"{pool}-0") != leader)
    assert survivors([leader, other]) == [], "a rank outlives its worker"
    await asyncio.to_thread(until_registered, cluster, pool, 1)
    assert len(children(cluster.pid(f"{pool}-0"))) == 1


async def test_a_rank_that_is_killed_is_restarted_and_loses_no_request(nodes: RayNodes, model, tmp_path):
    words = ("--encoders", "1", "--pd-workers", "1", "--stall-timeout", "30")
    ranks = ("--tensor-parallel", "2", "--encoder-data-parallel", "2")
    cluster = nodes.start_cluster(model, tmp_path / "run", *words, *ranks)
    try:
        await _exact(cluster, model, seed=70)
        await _without_a_rank(cluster, model, "pd", 71)
        await _without_a_rank(cluster, model, "encoder", 73)
        await _exact(cluster, model, seed=75)
        assert cluster.total("pd", "triptych_pd_ranks") == 2
        assert cluster.total("encoder", "triptych_encoder_ranks") == 2
        await asyncio.to_thread(assert_at_rest, cluster)
    finally:
        assert cluster.stop() == 0
    assert nodes.actors() == set()


async def test_encoders_follow_the_work_from_none_and_back(nodes: RayNodes, model, tmp_path):
    words = ("--encoders", "0..2", "--pd-workers", "1..2", "--scale-window", "2")
    cluster = nodes.start_cluster(model, tmp_path / "run", *words)
    try:
        assert {"encoder-0", "encoder-1"}.isdisjoint(nodes.actors())
        # Pictures wait for an encoder that only scaling starts.
        await _exact(cluster, model, seed=60)
        log = cluster.log.read_text()
        assert "start encoder-0" in log
        await asyncio.to_thread(until_registered, cluster, "encoder", 0)
        gone = {"triptych/triptych/encoder-0", "triptych/triptych/encoder-1"}
        await asyncio.to_thread(wait_for, "their groups to go", lambda: not nodes.groups() & gone)
        assert nodes.actors() >= {"pd-0", "proxy-0"}
        # And again.
        await _exact(cluster, model, seed=61)
    finally:
        assert cluster.stop() == 0
    assert nodes.groups() == set()


def _registered(nodes: RayNodes) -> list[str]:
    """Addresses that the registry has."""

    async def addresses() -> list[str]:
        store = await EmbeddingStore.connect(nodes.store.url)
        try:
            return [worker.address for worker in await Registry(store).workers()]
        finally:
            await store.close()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, addresses()).result(30)


async def test_ctrl_c_removes_what_is_ours_and_leaves_what_is_not(nodes: RayNodes, model, tmp_path):
    with nodes.driver() as ray:

        class Bystander:
            def here(self) -> bool:
                return True

        make = ray.remote(Bystander).options(name="bystander", lifetime="detached", num_cpus=0)
        ray.get(make.remote().here.remote())
        ray.util.placement_group([{"CPU": 0.01}], name="theirs", lifetime="detached").ready()
    cluster = nodes.start_cluster(model, tmp_path / "run", "--pd-workers", "1", "--cluster-name", "one")
    pids = [cluster.pid(name) for name in ("encoder-0", "pd-0", "proxy-0")]
    assert nodes.actors("one") == {"encoder-0", "pd-0", "proxy-0", "serve"}
    refused = nodes.refused(str(model), "--cluster-name", "one")
    assert refused.returncode == 2 and "is served already" in refused.stderr
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.stop() == 0
    assert survivors(pids) == []
    assert nodes.actors("one") == set()
    assert nodes.groups() == {"theirs"}
    assert _registered(nodes) == []
    with nodes.driver() as ray:
        bystander = ray.get_actor("bystander")
        assert ray.get(bystander.here.remote())
        ray.kill(bystander)
        ray.util.remove_placement_group(ray.util.get_placement_group("theirs"))


async def test_actors_of_a_killed_serve_go_on_and_the_next_one_adopts_them(nodes: RayNodes, model, tmp_path):
    cluster = nodes.start_cluster(model, tmp_path / "run", "--pd-workers", "1")
    pids = {name: cluster.pid(name) for name in ("encoder-0", "pd-0", "proxy-0")}
    port, grpc_port = (int(address.rpartition(":")[2]) for address in (cluster.url, cluster.grpc_address))
    cluster.process.kill()
    cluster.process.wait(30)
    await _exact(cluster, model, seed=70, count=2)
    same = ("--pd-workers", "1", "--port", str(port), "--grpc-port", str(grpc_port))
    second = nodes.start_cluster(model, tmp_path / "second", *same)
    try:
        assert {name: second.pid(name) for name in pids} == pids
        assert "3 actors are adopted, 0 replaced" in second.log.read_text()
        second.process.kill()
        second.process.wait(30)
        # Encoders of another command line are replaced, the others stay.
        third = nodes.start_cluster(model, tmp_path / "third", *same, "--tower-credit", "5")
        third.url = cluster.url
        try:
            after = {name: third.pid(name) for name in pids}
            assert after["encoder-0"] != pids["encoder-0"] and not lives(pids["encoder-0"])
            assert (after["pd-0"], after["proxy-0"]) == (pids["pd-0"], pids["proxy-0"])
            await _exact(cluster, model, seed=80, count=2)
        finally:
            assert third.stop() == 0
    finally:
        second.stop()
    assert nodes.actors() == set() and nodes.groups() == set()


async def test_no_secret_is_in_what_ray_keeps(nodes: RayNodes, model, tmp_path):
    cluster = nodes.start_cluster(model, tmp_path / "run", "--pd-workers", "1")
    try:
        token = nodes.token_file.read_text()
        with nodes.driver() as ray:
            kept = json.dumps([ray._private.state.actors(), ray.nodes()], default=str)
            words = ray.get(ray.get_actor("pd-0", namespace="triptych-triptych").command.remote())
        assert "pd-0" in kept and token not in kept
        assert str(nodes.token_file) in words and not any(token in word for word in words)
    finally:
        assert cluster.stop() == 0
    session = Path("/tmp/ray/session_latest/logs")
    logs = [path for path in session.rglob("*") if path.is_file()]
    assert logs
    assert not [path for path in logs if token.encode() in path.read_bytes()]

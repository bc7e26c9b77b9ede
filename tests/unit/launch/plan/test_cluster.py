"""The processes of a cluster, and what each is given."""

from __future__ import annotations

import pytest

from support.options import parse, serve_config
from triptych.apps.cli.app import app
from triptych.apps.launch.plan.cluster import plan_cluster
from triptych.apps.launch.plan.cores import share_cores
from triptych.apps.launch.serve import with_token
from triptych.base.config import ColocatedConfig, ProxyConfig, WorkerRange


def test_the_cluster_makes_up_a_token_of_its_own_and_keeps_client_keys_from_the_workers(tmp_path):
    config = serve_config("--api-key", "k" * 16)
    plans = [plan_cluster(with_token(config), tmp_path) for _ in range(2)]
    first, second = (plan.worker_secrets["TRIPTYCH_INTERNAL_TOKEN"] for plan in plans)
    assert len(first) >= 32
    assert first != second
    store = f"unix://{tmp_path}/store.sock"
    assert plans[0].proxy_secrets == {
        "TRIPTYCH_STORE": store,
        "TRIPTYCH_INTERNAL_TOKEN": first,
        "TRIPTYCH_API_KEY": "k" * 16,
    }
    assert plans[0].worker_secrets["TRIPTYCH_STORE"] == store
    assert first not in repr(plans[0])
    assert plans[0].worker_secrets["TRIPTYCH_API_KEY"] == ""


@pytest.mark.parametrize(("replicas", "connector"), [(1, "memory"), (2, "redis")])
def test_a_replica_alone_keeps_its_embeddings_and_several_share_them(tmp_path, replicas, connector):
    words = ["--topology", "colocated", "--replicas", str(replicas), "--encoder-batch-patches", "7"]
    config = serve_config(*words, "--store-memory", "4MiB")
    plan = plan_cluster(share_cores(config, 2), tmp_path)
    assert [name for name, _ in plan.workers] == [f"colocated-{index}" for index in range(replicas)]
    assert plan.pools == {"encoder": replicas, "pd": replicas}
    command = plan.workers[0][1]
    assert command[3] == "colocated"
    given = parse(ColocatedConfig, "colocated", *command[4:])
    assert (given.connector, given.store_memory) == (connector, 4 << 20)
    assert (given.encoder.encoder_batch_patches, given.pd.served_model_name) == (7, "demo")


def _planned(tmp_path, *words: str) -> dict[str, dict[str, object]]:
    """The parsed flags of each worker that `triptych serve` with these words would start."""
    plan = plan_cluster(share_cores(serve_config(*words), 2), tmp_path)
    return {
        name: app.commands[command[3]].make_context(name, list(command[4:])).params
        for name, command in plan.workers
    }


def test_pinned_workers_get_cores_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    workers = _planned(tmp_path, "--cpus-per-worker", "2")
    assert {name: flags["cpus"] for name, flags in workers.items()} == {"pd-0": "0,1", "encoder-0": "2,3"}
    workers = _planned(tmp_path, "--cpus-per-worker", "1", "--topology", "colocated", "--replicas", "2")
    assert [flags["cpus"] for flags in workers.values()] == ["0", "1"]


def test_without_a_word_towers_take_every_core_and_decode_steps_are_paced(tmp_path):
    workers = _planned(tmp_path)
    assert list(workers) == ["pd-0", "encoder-0", "encoder-1"]
    towers = [workers["encoder-0"], workers["encoder-1"]]
    assert [flags["threads"] for flags in towers] == [1, 1]
    assert all(flags["spare_cores"] for flags in workers.values())
    assert workers["pd-0"]["step_interval"] > 0 and workers["pd-0"]["keep_core"]
    assert {flags["core_page"] for flags in workers.values()} == {str(tmp_path / "cores")}
    alone = _planned(tmp_path, "--cpu-sharing", "free")
    assert list(alone) == ["pd-0", "encoder-0"]
    assert (alone["pd-0"]["step_interval"], alone["encoder-0"]["core_page"]) == (0.0, "")
    assert not alone["pd-0"]["keep_core"]


@pytest.mark.parametrize(("words", "cpus"), [((), "0,1"), (("--cpu-sharing", "free"), "")])
def test_the_proxy_keeps_off_the_core_that_a_paced_pd_worker_keeps_to(tmp_path, monkeypatch, words, cpus):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    plan = plan_cluster(share_cores(serve_config(*words), 3), tmp_path)
    assert parse(ProxyConfig, "proxy", *plan.proxy[4:]).cpus == cpus


def test_places_are_planned_for_the_most_workers_and_the_fewest_are_waited_for(tmp_path):
    words = ("--encoders", "0..3", "--pd-workers", "1..2")
    plan = plan_cluster(share_cores(serve_config(*words), 2), tmp_path)
    assert [name for name, _ in plan.workers] == ["pd-0", "pd-1", "encoder-0", "encoder-1", "encoder-2"]
    assert plan.pools == {"encoder": 0, "pd": 1}
    assert plan.scaled == {"encoder": WorkerRange(0, 3), "pd": WorkerRange(1, 2)}
    slots = [flags["core_slot"] for flags in _planned(tmp_path, *words).values()]
    assert slots == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("words", "decided"),
    [
        (("--encoders", "0..3", "--pd-workers", "1..2"), (0, 3, 1, 2)),
        (("--encoders", "2", "--pd-workers", "2..4"), (0, 0, 2, 4)),
        (("--encoders", "2"), (0, 0, 1, 0)),
    ],
)
def test_the_proxy_decides_on_the_pools_that_are_a_range(tmp_path, words, decided):
    plan = plan_cluster(share_cores(serve_config(*words), 2), tmp_path)
    scaling = parse(ProxyConfig, "proxy", *plan.proxy[4:]).scaling
    found = (scaling.min_encoders, scaling.max_encoders, scaling.min_pd_workers, scaling.max_pd_workers)
    assert found == decided


def test_roles_with_a_range_are_decided_on_apart_and_their_workers_count_for_them(tmp_path):
    words = ("--prefill-workers", "1..2", "--decode-workers", "2", "--encoders", "1")
    plan = plan_cluster(share_cores(serve_config(*words), 2), tmp_path)
    assert plan.pools == {"encoder": 1, "pd": 3}
    assert plan.scaled == {"pd;role=prefill": WorkerRange(1, 2)}
    assert {name: plan.target(name) for name, _ in plan.workers} == {
        "pd-0": "pd;role=prefill",
        "pd-1": "pd;role=prefill",
        "pd-2": "pd;role=decode",
        "pd-3": "pd;role=decode",
        "encoder-0": "encoder",
    }
    scaling = parse(ProxyConfig, "proxy", *plan.proxy[4:]).scaling
    decided = {each.target.name: (each.rules.minimum, each.rules.maximum) for each in scaling.targets()}
    assert decided == {"pd;role=prefill": (1, 2), "pd;role=decode": (2, 2)}


def test_each_pd_worker_is_given_its_role(tmp_path):
    planned = _planned(tmp_path, "--prefill-workers", "1", "--decode-workers", "1", "--encoders", "1")
    assert {name: given.get("role") for name, given in planned.items()} == {
        "pd-0": "prefill",
        "pd-1": "decode",
        "encoder-0": None,
    }

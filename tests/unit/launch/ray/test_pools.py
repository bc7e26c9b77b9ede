"""The actors of a cluster on Ray, and what each is given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.options import parse, serve_config
from triptych.apps.launch.ray.pools import ActorPool, plan_actors
from triptych.base.config import EncoderConfig, PDConfig, ProxyConfig, WorkerRange
from triptych.base.errors import ConfigError

STORE = "redis://10.0.0.5:6379/0"
TOKEN = ("--internal-token-file", "/files/token")


def _plan(*words: str, model: str = "/models/m") -> dict[str, ActorPool]:
    config = serve_config("--launcher", "ray", "--store", STORE, *TOKEN, *words)
    return plan_actors(config, model=model, store=STORE, home="10.0.0.1")


def _parsed(config: type, pool: ActorPool, name: str):
    words = pool.command_of(name)
    return parse(config, words[0], *words[1:])


def test_workers_are_started_by_words_that_their_command_reads():
    plan = _plan("--encoders", "0..4", "--pd-workers", "2", "--tower-credit", "5", "--kv-memory", "64MiB")
    assert list(plan) == ["encoder", "pd", "proxy"]
    assert (plan["encoder"].size, plan["pd"].size) == (WorkerRange(0, 4), WorkerRange.fixed(2))
    encoder = _parsed(EncoderConfig, plan["encoder"], "encoder-3")
    assert (encoder.model, encoder.store, encoder.tower_credit) == ("/models/m", STORE, 5)
    assert (encoder.internal_token_file, encoder.threads) == ("/files/token", 1)
    pd = _parsed(PDConfig, plan["pd"], "pd-0")
    assert (pd.kv_memory, pd.served_model_name, pd.core_page) == (64 << 20, "demo", "")


def test_the_proxies_decide_on_the_pools_that_are_ranges():
    scaling = _parsed(ProxyConfig, _plan("--encoders", "0..4")["proxy"], "proxy-0").scaling
    assert (scaling.min_encoders, scaling.max_encoders, scaling.max_pd_workers) == (0, 4, 0)


def test_a_proxy_of_loopback_stands_on_this_node_and_one_for_all_anywhere():
    assert _plan()["proxy"].resources.resources == {"node:10.0.0.1": 0.001}
    assert _plan("--host", "0.0.0.0", "--no-auth")["proxy"].resources.resources == {}


def test_what_a_pool_reserves_becomes_threads_and_memory_of_its_workers(tmp_path: Path):
    file = tmp_path / "pools.toml"
    file.write_text('[pd]\nnum_cpus = 3\nmemory = "1GiB"\n[encoder]\nnum_cpus = 0.5')
    plan = _plan("--ray-resources", str(file))
    pd = _parsed(PDConfig, plan["pd"], "pd-0")
    assert (pd.threads, pd.device_memory) == (3, 1 << 30)
    assert _parsed(EncoderConfig, plan["encoder"], "encoder-0").threads == 1
    plan = _plan("--ray-resources", str(file), "--threads", "2", "--encoder-threads", "4")
    assert _parsed(PDConfig, plan["pd"], "pd-0").threads == 2
    assert _parsed(EncoderConfig, plan["encoder"], "encoder-0").threads == 4


def test_the_least_share_a_placement_group_and_each_other_worker_has_its_own():
    pool = _plan("--pd-workers", "2..4")["pd"]
    assert [pool.group(name) for name in pool.names(4)] == ["pd", "pd", "pd-2", "pd-3"]
    assert [pool.bundle_index(name) for name in pool.names(4)] == [0, 1, 0, 0]
    assert (len(pool.bundles("pd")), len(pool.bundles("pd-2"))) == (2, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--device", "cuda:0"), "say --device cuda"),
        (("--cpus-per-worker", "2"), "num_cpus in --ray-resources"),
        (("--cpu-sharing", "pace"), "num_cpus in --ray-resources"),
        (("--cluster-name", "-x"), "--cluster-name"),
        (("--cluster-name", "x" * 41), "1 to 40"),
        (("--port", "0"), "name the proxies' ports"),
        (("--proxies", "3", "--port", "8000", "--grpc-port", "8020"), "choose them so that 10"),
    ],
)
def test_flags_that_mean_nothing_on_ray_are_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        _plan(*words)


def test_a_part_of_a_gpu_needs_the_memory_of_a_worker(tmp_path: Path):
    file = tmp_path / "pools.toml"
    file.write_text("[encoder]\nnum_gpus = 0.5\n")
    words = ("--device", "cuda", "--ray-resources", str(file))
    with pytest.raises(ConfigError, match="--device-memory"):
        _plan(*words)
    assert _plan(*words, "--device-memory", "8GiB")["encoder"].resources.num_gpus == 0.5


def test_ranks_reach_the_services_with_a_gpu_and_a_core_each():
    words = ("--device", "cuda", "--tensor-parallel", "4", "--encoder-data-parallel", "2")
    plan = _plan(*words)
    assert plan["pd"].resources.bundle == {"CPU": 4.0, "GPU": 4.0}
    assert plan["encoder"].resources.bundle == {"CPU": 2.0, "GPU": 2.0}
    pd, encoder = plan["pd"].command_of("pd-0"), plan["encoder"].command_of("encoder-0")
    assert pd[pd.index("--tensor-parallel") + 1] == "4" and pd[pd.index("--threads") + 1] == "4"
    assert encoder[encoder.index("--encoder-data-parallel") + 1] == "2"


def test_no_secret_reaches_the_words_of_an_actor():
    config = serve_config("--launcher", "ray", "--store", STORE)
    secret = replace(config.proxy, internal_token="hush-0123456789abcdef", api_key="hush-2")
    plan = plan_actors(
        replace(config, proxy=secret, store="redis://:hush@h/0"), model="", store=STORE, home="h"
    )
    assert not [
        word for pool in plan.values() for word in pool.command_of(f"{pool.name}-0") if "hush" in word
    ]

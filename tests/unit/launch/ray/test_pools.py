"""Pools on Ray: flags, words of workers, what each reserves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from support.certificates import CertificateFolder, issue, pem_of
from support.options import parse, serve_config
from triptych.apps.launch.ray.flags import check_shared, with_files, with_own_files
from triptych.apps.launch.ray.pools import PORTS, ActorPool, PoolResources, plan_actors, read_resources
from triptych.apps.launch.ray.supervisor import DesiredActors
from triptych.base.config import EncoderConfig, PDConfig, ProxyConfig, ServeConfig, WorkerRange
from triptych.base.errors import ConfigError

STORE = "redis://10.0.0.5:6379/0"
TOKEN = ("--internal-token-file", "/files/token")


@pytest.fixture
def pools_file(tmp_path: Path) -> Callable[[str], str]:
    """Writes a file of --ray-resources."""

    def write(text: str) -> str:
        (tmp_path / "pools.toml").write_text(text)
        return str(tmp_path / "pools.toml")

    return write


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


def test_pd_actors_of_each_role_are_a_pool_that_is_scaled_by_its_own_decision():
    plan = _plan("--prefill-workers", "1", "--decode-workers", "2..4")
    assert list(plan) == ["encoder", "pd-prefill", "pd-decode", "proxy"]
    prefill, decode = plan["pd-prefill"], plan["pd-decode"]
    assert (prefill.size, decode.size) == (WorkerRange.fixed(1), WorkerRange(2, 4))
    assert (prefill.target, decode.target) == ("pd;role=prefill", "pd;role=decode")
    assert [_parsed(PDConfig, pool, pool.names(1)[0]).role for pool in (prefill, decode)] == [
        "prefill",
        "decode",
    ]
    alone = _plan()["pd"]
    assert (_parsed(PDConfig, alone, "pd-0").role, alone.target) == ("both", "pd")
    desired = DesiredActors(plan)
    assert desired.workers("pd;role=decode").running == ["pd-decode-0", "pd-decode-1"]
    desired.start("pd-decode-2")
    assert desired.names == [
        "encoder-0",
        "pd-prefill-0",
        "pd-decode-0",
        "pd-decode-1",
        "pd-decode-2",
        "proxy-0",
    ]


def test_the_proxies_decide_on_the_pools_that_are_ranges():
    scaling = _parsed(ProxyConfig, _plan("--encoders", "0..4")["proxy"], "proxy-0").scaling
    assert (scaling.min_encoders, scaling.max_encoders, scaling.max_pd_workers) == (0, 4, 0)


def test_a_proxy_of_loopback_stands_on_this_node_and_one_for_all_anywhere():
    assert _plan()["proxy"].resources.resources == {"node:10.0.0.1": 0.001}
    assert _plan("--host", "0.0.0.0", "--no-auth")["proxy"].resources.resources == {}


def test_what_a_pool_reserves_becomes_threads_and_memory_of_its_workers(pools_file):
    file = pools_file('[pd]\nnum_cpus = 3\nmemory = "1GiB"\n[encoder]\nnum_cpus = 0.5')
    plan = _plan("--ray-resources", file)
    pd = _parsed(PDConfig, plan["pd"], "pd-0")
    assert (pd.threads, pd.device_memory) == (3, 1 << 30)
    assert _parsed(EncoderConfig, plan["encoder"], "encoder-0").threads == 1
    plan = _plan("--ray-resources", file, "--threads", "2", "--encoder-threads", "4")
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


def test_a_part_of_a_gpu_needs_the_memory_of_a_worker(pools_file):
    words = ("--device", "cuda", "--ray-resources", pools_file("[encoder]\nnum_gpus = 0.5\n"))
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


CPU = {"encoder": "cpu", "pd": "cpu", "proxy": ""}
CUDA = {"encoder": "cuda", "pd": "cuda", "proxy": ""}


def test_without_a_file_a_worker_reserves_a_cpu_and_on_cuda_a_gpu():
    assert read_resources("", CPU)["encoder"] == PoolResources()
    assert read_resources("", CPU)["pd"].bundle == {"CPU": 1.0}
    assert read_resources("", CUDA)["pd"].bundle == {"CPU": 1.0, "GPU": 1.0}
    assert read_resources("", CUDA)["proxy"].bundle == {"CPU": 1.0}


def test_every_key_of_a_pool_is_read(pools_file):
    text = """
    [encoder]
    num_cpus = 4
    num_gpus = 0.5
    memory = "2GiB"
    resources = { l4 = 1, "accelerator_type:L4" = 0.001 }
    strategy = "SPREAD"
    ports = "21000-21009"
    """
    read = read_resources(pools_file(text), CUDA)
    assert read["encoder"] == PoolResources(
        4.0, 0.5, 2 << 30, {"l4": 1.0, "accelerator_type:L4": 0.001}, "SPREAD", (21000, 21009)
    )
    assert read["encoder"].bundle == {
        "CPU": 4.0,
        "GPU": 0.5,
        "memory": float(2 << 30),
        "l4": 1.0,
        "accelerator_type:L4": 0.001,
    }
    assert read["pd"] == PoolResources(num_gpus=1.0)
    assert read["pd"].ports == PORTS


def test_all_ranks_of_a_worker_are_in_one_bundle_and_so_on_one_node(pools_file):
    ranks = {"pd": 2, "encoder": 1}
    assert read_resources("", CUDA, ranks)["pd"].bundle == {"CPU": 2.0, "GPU": 2.0}
    assert read_resources("", CPU, ranks)["pd"].bundle == {"CPU": 2.0}
    assert read_resources("", CUDA, ranks)["encoder"].bundle == {"CPU": 1.0, "GPU": 1.0}
    assert read_resources("", CUDA, ranks)["proxy"].bundle == {"CPU": 1.0}
    for given in ("1", "0.5", "4"):
        file = pools_file(f"[pd]\nnum_gpus = {given}\n")
        with pytest.raises(ConfigError, match="each of a worker's 2 ranks uses a GPU of its own; reserve 2"):
            read_resources(file, CUDA, ranks)


@pytest.mark.parametrize(
    ("text", "pools", "words"),
    [
        ("[encoders]", CPU, ("[encoders] is no pool", "encoder, pd, proxy")),
        ("num_cpus = 1", CPU, ("num_cpus stands in no table", "[encoder]")),
        ("[encoder]\nnum_cpu = 1", CPU, ("[encoder] has num_cpu", "num_cpus, num_gpus")),
        ("[encoder]\nnum_cpus = '1'", CPU, ("num_cpus = '1'", "write a number")),
        ("[encoder]\nnum_cpus = true", CPU, ("num_cpus = True", "write a number")),
        ("[encoder]\nnum_cpus = -1", CPU, ("num_cpus = -1", "write a number")),
        ("[encoder]\nnum_cpus = nan", CPU, ("num_cpus = nan", "write a number")),
        ("[encoder]\nnum_cpus = 1.5", CPU, ("num_cpus = 1.5", "whole numbers")),
        ("[encoder]\nnum_cpus = 0.00001", CPU, ("0.0001 at least",)),
        ("[encoder]\nnum_cpus = 0", CPU, ("reserves nothing", "0.1")),
        ("[encoder]\nnum_gpus = 1", CPU, ("used by nothing", "--device cuda")),
        ("[proxy]\nnum_gpus = 1", CUDA, ("used by nothing",)),
        ("[pd]\nnum_gpus = 0", CUDA, ("--device cuda", "reserve one")),
        ("[pd]\nnum_gpus = 2", CUDA, ("a worker uses one GPU",)),
        ("[pd]\nmemory = 'much'", CPU, ("[pd] memory", "512MiB")),
        ("[pd]\nmemory = 1.5", CPU, ("memory = 1.5", "16GiB")),
        ("[pd]\nresources = 3", CPU, ("resources", "write a table")),
        ("[pd]\nresources = { GPU = 1 }", CPU, ("GPU is written num_gpus",)),
        ("[pd]\nresources = { l4 = 'x' }", CPU, ("resources.l4 = 'x'", "write a number")),
        ("[pd]\nstrategy = 'spread'", CPU, ("strategy = 'spread'", "PACK, SPREAD")),
        ("[pd]\nports = '80-90'", CPU, ("ports = '80-90'", "1024")),
        ("[pd]\nports = '30000-20000'", CPU, ("ports", "like")),
        ("[pd", CPU, ("is not valid TOML",)),
    ],
)
def test_what_cannot_be_meant_is_refused_with_place_and_remedy(pools_file, text, pools, words):
    with pytest.raises(ConfigError) as refused:
        read_resources(pools_file(text), pools)
    assert all(word in str(refused.value) for word in ("--ray-resources", *words)), refused.value


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--ray-resources .*none.toml cannot be read"):
        read_resources(str(tmp_path / "none.toml"), CPU)


@pytest.fixture
def folder(tmp_path: Path) -> CertificateFolder:
    authority = trustme.CA()
    return CertificateFolder(tmp_path / "tls").write(issue(authority), pem_of(authority))


def config_of(tmp_path: Path, *words: str, address: str = "10.0.0.1:6379") -> ServeConfig:
    token = tmp_path / "token"
    token.write_text("x" * 32)
    common = ("--launcher", "ray", "--store", STORE, "--internal-token-file", str(token))
    return serve_config(*common, "--address", address, *words)


def test_services_on_several_nodes_need_tls_or_a_flag_that_allows_clear_text(tmp_path, folder):
    with pytest.raises(ConfigError, match="--tls-cert-file.*--insecure"):
        check_shared(config_of(tmp_path))
    check_shared(config_of(tmp_path, "--insecure"))
    check_shared(config_of(tmp_path, *folder.flags))
    check_shared(config_of(tmp_path, address="127.0.0.1:6379"))  # its nodes are this machine


def test_a_ray_of_this_machine_has_a_token_and_certificates_of_its_own(tmp_path, folder):
    run = tmp_path / "run"
    run.mkdir()
    config = with_files(with_own_files(serve_config("--launcher", "ray"), run))
    assert len(Path(config.proxy.internal_token_file).read_text()) >= 32
    for pool in plan_actors(config, model="", store="unix:///s", home="10.0.0.1").values():
        command = " ".join(pool.command)
        assert f"--tls-cert-file {run}/tls/cert.pem" in command, pool.name
        assert "--insecure" not in command, "what is sent from actor to actor is encrypted"
    assert {path.stat().st_mode & 0o777 for path in (run / "tls").iterdir()} == {0o600}
    given = with_own_files(serve_config("--launcher", "ray", *folder.flags), run)
    assert given.proxy.tls_cert_file == str(folder.cert)


def test_certificates_that_cannot_be_used_are_refused_on_this_node_already(tmp_path, folder):
    folder.key.write_bytes(b"")
    with pytest.raises(ConfigError, match="--tls-key-file"):
        with_files(config_of(tmp_path, *folder.flags))


def test_workers_and_proxies_get_the_files_by_absolute_paths(tmp_path, folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("--tls-cert-file", "tls/tls.crt", "--tls-key-file", "tls/tls.key", "--tls-ca-file", "tls/ca.crt")
    config = with_files(
        config_of(tmp_path, *words, "--http-cert-file", "tls/tls.crt", "--http-key-file", "tls/tls.key")
    )
    pools = plan_actors(config, model="", store=STORE, home="10.0.0.1")
    for pool in pools.values():
        command = " ".join(pool.command)
        assert f"--tls-cert-file {folder.cert} --tls-key-file {folder.key}" in command
        assert f"--tls-ca-file {folder.ca}" in command
        assert ("--http-key-file" in command) is (pool.name == "proxy")


def test_every_service_is_given_the_files_of_tls_to_the_store_by_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = ("--store-ca-file", "ca.pem", "--store-cert-file", "c.pem", "--store-key-file", "c.key")
    config = with_files(config_of(tmp_path, "--insecure", *files))
    pools = plan_actors(config, model="", store="rediss://10.0.0.5:6379/0", home="10.0.0.1")
    for pool in pools.values():
        for flag, file in zip(files[::2], files[1::2], strict=True):
            assert f"{flag} {tmp_path / file}" in " ".join(pool.command), pool.name

"""What Ray reserves for each pool, and what the file may not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.apps.launch.ray.pools import PORTS, PoolResources, read_resources
from triptych.base.errors import ConfigError

CPU = {"encoder": "cpu", "pd": "cpu", "proxy": ""}
CUDA = {"encoder": "cuda", "pd": "cuda", "proxy": ""}


def _read(tmp_path: Path, text: str, pools: dict[str, str] = CPU) -> dict[str, PoolResources]:
    file = tmp_path / "pools.toml"
    file.write_text(text)
    return read_resources(str(file), pools)


def test_without_a_file_a_worker_reserves_a_cpu_and_on_cuda_a_gpu():
    assert read_resources("", CPU)["encoder"] == PoolResources()
    assert read_resources("", CPU)["pd"].bundle == {"CPU": 1.0}
    assert read_resources("", CUDA)["pd"].bundle == {"CPU": 1.0, "GPU": 1.0}
    assert read_resources("", CUDA)["proxy"].bundle == {"CPU": 1.0}


def test_every_key_of_a_pool_is_read(tmp_path):
    text = """
    [encoder]
    num_cpus = 4
    num_gpus = 0.5
    memory = "2GiB"
    resources = { l4 = 1, "accelerator_type:L4" = 0.001 }
    strategy = "SPREAD"
    ports = "21000-21009"
    """
    read = _read(tmp_path, text, CUDA)
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


def test_all_ranks_of_a_worker_are_in_one_bundle_and_so_on_one_node(tmp_path: Path):
    ranks = {"pd": 2, "encoder": 1}
    assert read_resources("", CUDA, ranks)["pd"].bundle == {"CPU": 2.0, "GPU": 2.0}
    assert read_resources("", CPU, ranks)["pd"].bundle == {"CPU": 2.0}
    assert read_resources("", CUDA, ranks)["encoder"].bundle == {"CPU": 1.0, "GPU": 1.0}
    assert read_resources("", CUDA, ranks)["proxy"].bundle == {"CPU": 1.0}
    file = tmp_path / "pools.toml"
    for given in ("1", "0.5", "4"):
        file.write_text(f"[pd]\nnum_gpus = {given}\n")
        with pytest.raises(ConfigError, match="each of a worker's 2 ranks uses a GPU of its own; reserve 2"):
            read_resources(str(file), CUDA, ranks)


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
def test_what_cannot_be_meant_is_refused_with_place_and_remedy(tmp_path, text, pools, words):
    with pytest.raises(ConfigError) as refused:
        _read(tmp_path, text, pools)
    assert all(word in str(refused.value) for word in ("--ray-resources", *words)), refused.value


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--ray-resources .*none.toml cannot be read"):
        read_resources(str(tmp_path / "none.toml"), CPU)

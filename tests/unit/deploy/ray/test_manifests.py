"""The manifests and scripts of deploy/ray: valid by a strict schema, and in step with the code's flags."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from support.options import parse
from triptych.apps.launch.ray.flags import check_secrets, check_shared
from triptych.apps.launch.ray.pools import PoolResources, plan_actors, read_resources
from triptych.base.config import ServeConfig

FOLDER = Path(__file__).parents[4] / "deploy" / "ray"
SCHEMA = Draft202012Validator(json.loads((FOLDER / "schema.json").read_text()))
DOCUMENTS = list(yaml.safe_load_all((FOLDER / "rayjob.yaml").read_text()))


def _one(kind: str) -> dict[str, Any]:
    (found,) = [one for one in DOCUMENTS if one["kind"] == kind]
    return found


JOB = _one("RayJob")
CLUSTER = JOB["spec"]["rayClusterSpec"]


def _pods() -> dict[str, dict[str, Any]]:
    """The pod templates by group."""
    groups = {group["groupName"]: group["template"] for group in CLUSTER["workerGroupSpecs"]}
    return {"head": CLUSTER["headGroupSpec"]["template"], **groups}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda one: one["kind"])
def test_a_manifest_is_valid(document):
    assert [error.message for error in SCHEMA.iter_errors(document)] == []


def _served(words: list[str]) -> ServeConfig:
    """The config that a command line of `triptych serve` makes."""
    assert words[:2] == ["triptych", "serve"]
    return parse(ServeConfig, "serve", *words[2:])


@pytest.fixture
def pools(tmp_path) -> dict[str, PoolResources]:
    file = tmp_path / "pools.toml"
    file.write_text(_one("ConfigMap")["data"]["pools.toml"])
    return read_resources(str(file), {"encoder": "cuda", "pd": "cuda", "proxy": ""})


def test_the_entry_point_is_a_command_that_the_code_knows():
    config = _served(shlex.split(JOB["spec"]["entrypoint"]))
    assert (config.launcher, config.ray.address) == ("ray", "auto")
    assert not config.proxy.internal_token and not config.proxy.api_key
    check_secrets(config)
    check_shared(config)


def test_every_file_that_a_flag_names_is_mounted_where_it_is_read():
    config = _served(shlex.split(JOB["spec"]["entrypoint"]))
    files = [config.proxy.internal_token_file, config.proxy.store_password_file]
    stored = {Path(file).name for file in (*files, config.proxy.api_key_file)}
    assert stored == set(_one("Secret")["stringData"])
    for name, pod in _pods().items():
        (container,) = pod["spec"]["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        assert set(mounts.values()) <= volumes
        wanted = [*files, *((config.proxy.api_key_file, config.ray.ray_resources) if name == "head" else ())]
        assert all(str(Path(file).parent) in mounts for file in wanted), name
        assert "/models" in mounts


def test_every_pool_finds_its_resources_in_a_group_of_pods(pools):
    groups = {"proxy": CLUSTER["headGroupSpec"]}
    groups |= {group["groupName"]: group for group in CLUSTER["workerGroupSpecs"]}
    for name, pool in pools.items():
        offered = json.loads(json.loads(groups[name]["rayStartParams"]["resources"]))
        assert all(offered.get(resource, 0) >= number for resource, number in pool.resources.items())
        (container,) = groups[name]["template"]["spec"]["containers"]
        limits = container["resources"]["requests"]
        assert pool.num_cpus <= float(limits["cpu"])
        assert pool.num_gpus <= float(limits.get("nvidia.com/gpu", 0))


def test_the_service_finds_the_proxy_at_its_ports():
    config = _served(shlex.split(JOB["spec"]["entrypoint"]))
    spec = _one("Service")["spec"]
    assert spec["selector"].items() <= _pods()["head"]["metadata"]["labels"].items()
    assert [port["targetPort"] for port in spec["ports"]] == [config.proxy.port, config.proxy.grpc_port]
    (container,) = _pods()["head"]["spec"]["containers"]
    open_ports = {port["containerPort"] for port in container["ports"]}
    assert {config.proxy.port, config.proxy.grpc_port} <= open_ports


def test_the_plan_of_the_manifest_can_be_made(tmp_path):
    words = shlex.split(JOB["spec"]["entrypoint"])
    file = tmp_path / "pools.toml"
    file.write_text(_one("ConfigMap")["data"]["pools.toml"])
    words[words.index("--ray-resources") + 1] = str(file)
    config = _served(words)
    plan = plan_actors(config, model=config.model, store=config.store, home="10.0.0.1")
    assert plan["encoder"].resources.bundle == {"CPU": 4.0, "GPU": 1.0, "triptych_encoder": 1.0}


def test_the_slurm_script_is_bash_and_its_command_is_known():
    script = FOLDER / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=30)
    text = script.read_text().replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.startswith("triptych serve")]
    config = _served(shlex.split(line.removesuffix("&").replace("$STORE", "redis://store:6379/0")))
    check_secrets(config)
    check_shared(config)
    assert config.launcher == "ray"

"""Every flag, variable, port and probe path of the manifests is one of the code's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.kubernetes.chart import CASES, ROOT, Manifest, case, render
from support.kubernetes.combinations import VLLM
from support.kubernetes.commands import check_command, config_of, services, words
from support.kubernetes.manifests import called, component, containers, main_container, of_kind, pod
from triptych.base.config import check_scaling
from triptych.base.scaling import ScalingTarget

SOURCES = ("triptych", "proxy", "encoder_worker", "pd_worker", "ec_connector")


@cache
def source() -> str:
    """The text of the product's modules."""
    return "".join(path.read_text() for folder in SOURCES for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("name", CASES)
def test_the_code_takes_every_command_line(name: str) -> None:
    found = services(case(name))
    assert {component(one) for one in found} >= {"proxy"}
    for manifest in found:
        check_command(manifest)


def test_a_service_says_that_it_is_insecure_only_where_it_is() -> None:
    door = {"proxy": {"frontDoorTls": {"existingSecret": "public"}}}
    plain = {"tls": {"enabled": False}}
    for values, insecure in (
        (plain, {"proxy", "encoder", "pd"}),
        ({}, {"proxy"}),
        (door | plain, {"encoder", "pd"}),
        (door, set()),
    ):
        found = services(render(values))
        for manifest in found:
            check_command(manifest)
        assert {component(one) for one in found if "--insecure" in words(one)} == insecure


@pytest.mark.parametrize("name", CASES)
def test_every_file_that_a_flag_names_is_mounted(name: str) -> None:
    for manifest in services(case(name)):
        volumes = {one["name"]: one for one in pod(manifest)["volumes"]}
        mounted = set()
        for container in containers(manifest):
            files = files_of(manifest, container)
            assert files
            mounts = [one["mountPath"] for one in container["volumeMounts"]]
            for file in files:
                assert any(file == mount or file.startswith(f"{mount}/") for mount in mounts), file
            for mount in container["volumeMounts"]:
                keys = [one["path"] for one in volumes[mount["name"]].get("secret", {}).get("items", [])]
                for key in keys:
                    assert f"{mount['mountPath']}/{key}" in files
                mounted.add(mount["name"])
        assert mounted == set(volumes)


def files_of(manifest: Manifest, container: dict[str, Any]) -> set[str]:
    """The files that a container's words, scripts and variables name.

    The connector's configuration is written by an init container, and read by vLLM.
    """
    variables = [one for each in containers(manifest) for one in each["env"] if one["name"] == "EC_TRANSFER"]
    own = [one for one in container["env"] if one not in variables]
    read = [*own, *variables] if container["name"] == "vllm" else own
    texts = [*container["args"], *(str(one.get("value", "")) for one in read)]
    return {file for text in texts for file in re.findall(r"(?<![\w:/@])/[\w./-]+", text)}


@pytest.mark.parametrize("name", CASES)
def test_every_probe_asks_a_page_of_the_metrics_port(name: str) -> None:
    pages = set(re.findall(r'path == "(/\w+)"', (ROOT / "triptych/base/status_server.py").read_text()))
    assert {"/health", "/ready"} <= pages
    for manifest in services(case(name)):
        container = main_container(manifest)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container[probe]["httpGet"]
            assert asked["port"] == "metrics"
            assert asked["path"] in pages
        assert container["livenessProbe"]["httpGet"]["path"] == "/health"
        assert container["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_a_proxy_is_not_restarted_because_pd_workers_load_for_long() -> None:
    """It is ready with the first PD worker only, and alive before."""
    proxy = next(one for one in services(render()) if component(one) == "proxy")
    assert main_container(proxy)["startupProbe"]["httpGet"]["path"] == "/health"


def test_proxies_and_keda_agree_on_the_limits() -> None:
    manifests = render(
        {
            "autoscaling": {"engine": "keda"},
            "encoderPools": [{"name": "a", "autoscale": {"max": 5}}],
            "pdPools": [{"name": "b", "autoscale": {"min": 2, "max": 7}}],
        }
    )
    scaling = next(config_of(one) for one in services(manifests) if component(one) == "proxy").scaling
    objects = {
        one["spec"]["triggers"][0]["metadata"]["pool"]: one["spec"]
        for one in manifests
        if one["kind"] == "ScaledObject"
    }
    assert (scaling.min_encoders, scaling.max_encoders) == (0, 5)
    assert (scaling.min_pd_workers, scaling.max_pd_workers) == (2, 7)
    for pool, minimum, maximum in (("encoder", 0, 5), ("pd", 2, 7)):
        assert (objects[pool]["minReplicaCount"], objects[pool]["maxReplicaCount"]) == (minimum, maximum)
        assert "fallback" not in objects[pool], "its number would replace the pods that there are"


def told_apart(values: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The limits of each target by its name; the proxies' are those of KEDA's objects, and workers are so."""
    manifests = render(values | {"autoscaling": {"engine": "keda"}})
    scaling = next(config_of(one) for one in services(manifests) if component(one) == "proxy").scaling
    check_scaling(scaling)
    proxies = {one.target.name: (one.rules.minimum, one.rules.maximum) for one in scaling.targets()}
    objects = {}
    for one in manifests:
        if one["kind"] == "ScaledObject":
            given = one["spec"]["triggers"][0]["metadata"]
            target = ScalingTarget(*(given.get(name, "") for name in ("pool", "model", "kind", "role")))
            objects[target.name] = (one["spec"]["minReplicaCount"], one["spec"]["maxReplicaCount"])
            if target.kind:
                name = one["spec"]["scaleTargetRef"]["name"]
                worker = next(each for each in services(manifests) if each["metadata"]["name"] == name)
                assert config_of(worker).worker_kind == target.kind
    assert objects == proxies
    return objects


def test_each_model_kind_and_role_has_limits_of_its_own() -> None:
    model = {"source": "pvc", "name": "a", "path": "a", "pvc": {"existingClaim": "c"}}
    other = {"name": "b", "path": "b"}
    two_models = {
        "model": model,
        "encoderPools": [
            {"name": "x", "autoscale": {"min": 0, "max": 3}},
            {"name": "y", "model": other, "autoscale": {"min": 1, "max": 2}},
        ],
        "pdPools": [{"name": "x"}, {"name": "y", "model": other, "autoscale": {"max": 4}}],
    }
    assert told_apart(two_models) == {
        "encoder;model=a": (0, 3),
        "encoder;model=b": (1, 2),
        "pd;model=b": (1, 4),
    }
    kinds = {
        "encoderPools": [
            {"name": "cpu", "autoscale": {"max": 9, "price": 0.1}},
            {"name": "gpu", "device": "cuda", "autoscale": {"max": 2}},
        ],
        "pdPools": [
            {"name": "p", "role": "prefill", "autoscale": {"max": 2}},
            {"name": "d", "role": "decode", "autoscale": {"max": 5}},
        ],
    }
    assert told_apart({"model": model} | kinds) == {
        "encoder;model=a;kind=cpu": (0, 9),
        "encoder;model=a;kind=gpu": (1, 2),
        "pd;model=a;role=prefill": (1, 2),
        "pd;model=a;role=decode": (1, 5),
    }


def test_encoders_in_the_pods_of_a_pd_pool_are_told_apart_from_the_pool_that_is_scaled() -> None:
    """Else KEDA would start, beside those that there are, as many as there should be in all."""
    scaled = [{"name": "x", "autoscale": {"max": 6}}]
    within = {"pd": {"encoder": {"resources": {}}}, "encoderPools": scaled}
    assert told_apart(within) == {"encoder;kind=x": (0, 6)}
    assert told_apart({"encoderPools": scaled}) == {"encoder": (0, 6)}
    model = {"name": "b", "path": "b"}
    both = {"encoder": {"model": model}, "pd": {"model": model, **within["pd"]}, "encoderPools": scaled}
    assert list(told_apart(both)) == ["encoder;kind=x"]


def test_gpu_pools_never_go_to_zero_unless_they_are_told_to() -> None:
    for given, minimum in (({}, 1), ({"min": 0}, 0)):
        manifests = render(
            {
                "autoscaling": {"engine": "keda"},
                "encoderPools": [{"name": "a", "device": "cuda", "autoscale": {"max": 5, **given}}],
            }
        )
        (scaled,) = [one for one in manifests if one["kind"] == "ScaledObject"]
        assert scaled["spec"]["minReplicaCount"] == minimum


def test_the_download_takes_the_files_that_the_code_takes_from_a_hub() -> None:
    def patterns(path: Path) -> str:
        (found,) = re.findall(r"\[(\"\*\.json\"[^\]]*)\]", path.read_text())
        return str(found)

    code = ROOT / "triptych/apps/launch/model_path.py"
    assert patterns(ROOT / "deploy/helm/triptych/files/download.py") == patterns(code)


def test_the_download_ends_with_the_file_that_workers_wait_for(tmp_path: Path) -> None:
    (tmp_path / "huggingface_hub.py").write_text(
        "from pathlib import Path\n"
        "def snapshot_download(name, *, revision, local_dir, allow_patterns):\n"
        "    assert not Path(local_dir, '.complete').exists()\n"
        "    Path(local_dir).mkdir()\n"
        "    Path(local_dir, 'config.json').write_text(f'{name} {revision}')\n"
    )
    download = {"id": "a/b", "revision": "v1"}
    shared = {"accessModes": ["ReadWriteMany"], "storageClass": "nfs"}
    (job,) = of_kind(
        render({"model": {"source": "download", "name": "m", "download": download, "pvc": shared}}), "Job"
    )
    container = main_container(job)
    assert container["command"] == ["python", "-c"]
    folder = tmp_path / "model"
    given = {one["name"]: one["value"] for one in container["env"]} | {"FOLDER": str(folder)}
    # A second run, as after a restart, finds everything there.
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-c", *container["args"]],
            env=given | {"PYTHONPATH": str(tmp_path)},
            check=True,
            timeout=30,
        )
    assert (folder / "config.json").read_text() == "a/b v1"
    assert (folder / ".complete").read_text() == "a/b@v1"
    # Other weights are not taken for these, whose cache keys they would have.
    other = subprocess.run(
        [sys.executable, "-c", *container["args"]],
        env=given | {"PYTHONPATH": str(tmp_path), "MODEL_REVISION": "v2"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert other.returncode == 1
    assert "has a/b@v1, and a/b@v2 is wanted: leave model.path out, or name another folder" in other.stderr


@pytest.mark.parametrize(("there", "code"), [("", 0), ("a/b@v1", 0), ("a/b@v0", 1)])
def test_workers_do_not_start_with_another_revision_than_is_wanted(tmp_path, there: str, code: int) -> None:
    """What an older chart has downloaded says nothing of its revision."""
    download = {"id": "a/b", "revision": "v1"}
    shared = {"accessModes": ["ReadWriteMany"], "storageClass": "nfs"}
    model = {"source": "download", "name": "m", "path": "m", "download": download, "pvc": shared}
    earlier = {"name": "earlier", "model": {"name": "m", "path": "m0"}}
    manifests = render({"model": model, "pdPools": [{"name": "default"}, earlier]})
    (tmp_path / ".complete").write_text(there)
    for pool, wanted in (("default", code), ("earlier", 0)):
        (wait,) = pod(called(manifests, "Deployment", f"triptych-pd-{pool}"))["initContainers"]
        given = {one["name"]: one["value"] for one in wait["env"]}
        assert given["COMPLETE"] == f"/model/{'m' if pool == 'default' else 'm0'}/.complete"
        run = subprocess.run(
            [*wait["command"], *wait["args"]],
            env={"PATH": os.environ["PATH"]} | given | {"COMPLETE": str(tmp_path / ".complete")},
            timeout=30,
        )
        assert run.returncode == wanted, pool


def test_every_service_sends_its_spans_to_the_collector() -> None:
    values = {"tracing": {"endpoint": "https://collector.example:4318", "sample": 0.25}}
    manifests = render(values)
    for manifest in services(manifests):
        config = config_of(manifest)
        assert (config.otlp_endpoint, config.trace_sample) == ("https://collector.example:4318", 0.25)
    for policy in (one for one in manifests if one["kind"] == "NetworkPolicy"):
        ports = [port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]]
        assert (4318 in ports) is (component(policy) != "store")
    assert "--otlp-endpoint" not in str(render())


def test_values_of_the_proxies_reach_their_flags() -> None:
    values = {"proxy": {"allowedHosts": ["gateway.example", "10.0.0.1"]}}
    (proxy,) = (one for one in services(render(values)) if component(one) == "proxy")
    assert config_of(proxy).allowed_hosts == "gateway.example,10.0.0.1"
    assert "--allowed-hosts" not in str(render())


def test_values_of_the_workers_reach_their_flags_and_a_pools_own_come_first() -> None:
    values = {
        "encoder": {"maxDecodeSeconds": 2.5, "storeRows": "int8"},
        "encoderPools": [{"name": "a"}, {"name": "b", "maxDecodeSeconds": 600, "storeRows": "dtype"}],
        "pd": {"linearKernel": "onednn", "sharePrefixes": "on"},
        "pdPools": [{"name": "c"}, {"name": "d", "linearKernel": "triptych", "sharePrefixes": "auto"}],
        "colocatedPools": [{"name": "e"}],
    }
    found = {
        one["metadata"]["labels"]["triptych/pool"]: config_of(one)
        for one in services(render(values))
        if component(one) != "proxy"
    }
    assert {name: found[name].max_decode_seconds for name in "ab"} == {"a": 2.5, "b": 600}
    assert {name: found[name].ec_store_rows for name in "ab"} == {"a": "int8", "b": "dtype"}
    assert found["e"].encoder.ec_store_rows == "int8"
    assert {name: found[name].linear_kernel for name in "cd"} == {"c": "onednn", "d": "triptych"}
    assert {name: found[name].share_prefixes for name in "cd"} == {"c": "on", "d": "auto"}
    assert (found["e"].encoder.max_decode_seconds, found["e"].pd.linear_kernel) == (2.5, "onednn")


def test_pools_of_pd_workers_have_their_roles_in_flags_and_in_llm_ds_label() -> None:
    pools = [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}, {"name": "b"}]
    rendered = render({"pdPools": pools, "proxy": {"prefillThreshold": 64}})
    found = {
        one["metadata"]["labels"]["triptych/pool"]: (
            config_of(one).role,
            one["spec"]["template"]["metadata"]["labels"]["llm-d.ai/role"],
        )
        for one in services(rendered)
        if component(one) == "pd"
    }
    assert found == {"p": ("prefill", "prefill"), "d": ("decode", "decode"), "b": ("both", "prefill-decode")}
    (proxy,) = (one for one in services(rendered) if component(one) == "proxy")
    assert config_of(proxy).prefill_threshold == 64


def test_a_pool_in_front_of_vllm_has_no_kernel_of_ours() -> None:
    model = {"source": "pvc", "name": "m", "pvc": {"existingClaim": "c"}}
    assert "--linear-kernel" not in str(render({"model": model, **VLLM}))

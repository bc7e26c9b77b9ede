"""PD pools in front of vLLM: the server beside each worker, and what both agree on."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helm_python.errors import HelmError

from support.kubernetes.chart import ROOT, Manifest, example, render
from support.kubernetes.manifests import (
    called,
    component,
    containers,
    main_container,
    of_kind,
    pod,
    workloads,
)
from support.monitoring.metric_table import documented
from triptych import __version__
from triptych.integrations.vllm.options import parse_options
from triptych.pd_worker.vllm.adapters import Adapter, lora_flags, parse_modules
from triptych.pd_worker.vllm.kv_transfer import transfer_config

FOLDER = "deploy/helm/triptych/examples"
EXAMPLE = example("qwen3-vl-8b-l4-encoders")
EXTERNAL = {"url": "rediss://me@redis.example:6380/0", "caSecret": "ca", "clientSecret": "client"}
NAMESPACE = "a1" * 32


def merged(values: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The example with further values; those of an object beside the example's own."""
    return values | {
        key: values.get(key, {}) | value if isinstance(value, dict) else value for key, value in more.items()
    }


def worker(**more: Any) -> Manifest:
    """The PD pool's Deployment of the example, with further values."""
    return next(one for one in workloads(render(merged(EXAMPLE, **more))) if component(one) == "pd")


def named(manifest: Manifest, name: str) -> dict[str, Any]:
    (found,) = [one for one in containers(manifest) if one["name"] == name]
    return found


def transfer_of(manifest: Manifest, folder: Path) -> dict[str, Any]:
    """The connector's configuration as the init container writes it, for an encoder with NAMESPACE."""
    container = named(manifest, "namespace")
    (folder / "triptych").write_text(f'#!/bin/sh\necho "$@" > {folder}/asked\necho {NAMESPACE}\n')
    (folder / "triptych").chmod(0o755)
    script, *words = container["args"]
    script = script.replace("/tmp/vllm", str(folder))
    variables = {one["name"]: one["value"] for one in container["env"]}
    subprocess.run(
        ["sh", "-c", script, *words],
        env=variables | {"PATH": f"{folder}:{os.environ['PATH']}"},
        check=True,
        timeout=30,
    )
    written: dict[str, Any] = json.loads((folder / "ec-transfer.json").read_text())
    return written


@pytest.mark.parametrize(
    ("more", "store"),
    [
        ({"tls": {"enabled": False}}, "redis://triptych-vllm@triptych-store-0.default.svc:6379/0"),
        ({}, "rediss://triptych-vllm@triptych-store-0.default.svc:6379/0"),
        (
            {"store": {"mode": "external", "acl": False, "existingSecret": "s", "external": EXTERNAL}},
            "rediss://me@redis.example:6380/0",
        ),
    ],
)
def test_the_connector_takes_the_configuration_that_the_pod_writes(more, store, tmp_path):
    manifest = worker(**more)
    transfer = transfer_of(manifest, tmp_path)
    assert transfer["ec_connector"] == "TriptychECConnector"
    assert transfer["ec_role"] == "ec_consumer"
    given = transfer["ec_connector_extra_config"]
    assert given["store"] == store
    mounts = {one["mountPath"] for one in named(manifest, "vllm")["volumeMounts"]}
    files = {name: given.pop(name) for name in list(given) if name.endswith("_file")}
    assert {str(Path(file).parent) for file in files.values()} <= mounts
    assert ("store_ca_file" in files) is (store.startswith("rediss:"))
    # It reads at encoder workers only with what its worker has.
    words = main_container(manifest)["args"]
    for name in ("internal_token_file", "tls_cert_file", "tls_key_file", "tls_ca_file"):
        flag = "--" + name.replace("_", "-")
        assert files.get(name) == (words[words.index(flag) + 1] if flag in words else None)
    assert "internal_token_file" in files
    options = parse_options(given)
    assert options.namespaces == (NAMESPACE,)
    assert options.host_memory_bytes == 4 << 30


def test_the_encoders_dtype_may_be_written_in_one_word() -> None:
    assert render(merged(EXAMPLE, encoder={"args": ["--dtype=bfloat16"]}))


def test_only_encoders_of_its_model_need_its_dtype() -> None:
    other = {"name": "b", "model": {"name": "b", "path": "b"}}
    native = other | {"engine": "native"}
    pools = {"encoderPools": [{"name": "a"}, other | {"args": []}], "pdPools": [{"name": "a"}, native]}
    assert render(merged(EXAMPLE, **pools))
    of_b = {"encoderPools": [other | {"args": []}], "pdPools": [{"name": "a"}]}
    for values in (pools | {"pdPools": [{"name": "a"}, other]}, of_b | {"pd": {"model": other["model"]}}):
        with pytest.raises(HelmError, match="encoderPools.b: args have no"):
            render(merged(EXAMPLE, **values))


def test_worker_server_and_namespace_are_of_one_model_dtype_and_revision(tmp_path: Path) -> None:
    manifest = worker(model={"revision": "v7"})
    transfer_of(manifest, tmp_path)
    path = "/model/Qwen3-VL-8B-Instruct"
    asked = (tmp_path / "asked").read_text().split()
    assert asked == ["namespace", path, "--dtype", "bfloat16", "--model-revision", "v7"]
    for name in ("vllm", "pd"):
        words = named(manifest, name)["args"]
        assert path in words
        assert words[words.index("--dtype") + 1] == "bfloat16"
    ours = main_container(manifest)["args"]
    assert ours[ours.index("--model-revision") + 1] == "v7"
    server = named(manifest, "vllm")["args"]
    url = f"http://{server[server.index('--host') + 1]}:{server[server.index('--port') + 1]}"
    assert ours[ours.index("--engine-url") + 1] == url == "http://127.0.0.1:8000"


def test_the_server_is_a_sidecar_that_starts_before_the_worker_and_ends_after_it() -> None:
    started = pod(worker())["initContainers"]
    assert [(one["name"], one.get("restartPolicy")) for one in started] == [
        ("namespace", None),
        ("vllm", "Always"),
    ]
    assert started[1]["startupProbe"] and started[1]["livenessProbe"]


def test_the_model_is_there_before_its_namespace_is_asked_for() -> None:
    download = {"source": "download", "download": {"id": "a/b", "revision": "f" * 40}, "path": ""}
    started = pod(worker(model=download))["initContainers"]
    assert [one["name"] for one in started] == ["wait-for-model", "namespace", "vllm"]
    # It computes nothing: the worker's image is on the node already.
    assert started[0]["image"] == f"triptych-worker-cpu:{__version__}"


@pytest.mark.parametrize("page", ["docs/kubernetes.md", f"{FOLDER}/qwen3-vl-8b-l4-encoders.yaml"])
def test_the_images_that_are_to_be_built_for_the_example_are_those_that_it_pulls(page: str) -> None:
    pulled = [part["image"] for each in workloads(render(EXAMPLE)) for part in containers(each)]
    (built,) = re.findall(r'make images IMAGES="(.*?)"', (ROOT / page).read_text(encoding="utf-8"))
    assert set(built.split()) == set(re.findall(r"triptych-([\w-]+):", " ".join(pulled)))


def test_the_gpus_are_the_servers_and_the_ranks_too() -> None:
    manifest = worker(pd={"tensorParallel": 2})
    server = named(manifest, "vllm")
    assert server["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert server["args"][server["args"].index("--tensor-parallel-size") + 1] == "2"
    ours = main_container(manifest)
    assert "nvidia.com/gpu" not in ours["resources"]["limits"]
    assert not {"--device", "--tensor-parallel"} & set(ours["args"])
    assert ours["image"].startswith("triptych-worker-cpu:")


def test_the_servers_user_is_one_of_the_store_and_reads_no_other_password() -> None:
    manifests = render(EXAMPLE)
    users = called(manifests, "Secret", "triptych-store")["stringData"]["users.acl"]
    assert "user triptych-vllm reset on #" in users and "HASH" not in users
    mounted = {one["name"] for one in named(worker(), "vllm")["volumeMounts"]}
    assert "store-password-vllm" in mounted and "store-password" not in mounted
    without = called(render(), "Secret", "triptych-store")["stringData"]
    assert "vllm" not in without and "triptych-vllm" not in without["users.acl"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"pd": {"vllm": EXAMPLE["pd"]["vllm"] | {"image": ""}}},
            "give an image of vLLM with triptych in it",
        ),
        ({"model": {"source": "demo"}}, "vLLM does not have the demo model"),
        ({"encoder": {"args": []}}, "encoders save what vLLM reads"),
        ({"encoder": {"args": ["--dtype", "float32"]}}, "encoders save what vLLM reads"),
        ({"pd": {"vllm": EXAMPLE["pd"]["vllm"] | {"hostMemory": "64Gi"}}}, "counts as memory"),
        (
            {"store": {"mode": "external", "external": {"urlSecret": {"name": "s"}}}},
            "give store.external.url without its password",
        ),
    ],
)
def test_what_a_server_cannot_work_with_ends_the_installation_with_the_remedy(more, words):
    with pytest.raises(HelmError, match=words):
        render(merged(EXAMPLE, **more))


@pytest.mark.parametrize("claim", ["", "compiled"])
def test_what_vllm_compiles_goes_to_a_claim_or_to_a_volume_of_a_size(claim: str) -> None:
    server = EXAMPLE["pd"]["vllm"] | {"cacheClaim": claim, "cacheSize": "9Gi"}
    manifest = worker(pd={"vllm": server})
    (volume,) = [one for one in pod(manifest)["volumes"] if one["name"] == "vllm-cache"]
    assert volume.get("persistentVolumeClaim") == ({"claimName": claim} if claim else None)
    assert volume.get("emptyDir") == (None if claim else {"sizeLimit": "9Gi"})
    container = named(manifest, "vllm")
    assert {"name": "vllm-cache", "mountPath": "/cache"} in container["volumeMounts"]
    variables = {one["name"]: one.get("value", "") for one in container["env"]}
    caches = [name for name, value in variables.items() if value.startswith("/cache")]
    assert {"VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"} <= set(caches)


@pytest.mark.parametrize(
    ("block", "ends", "meta"),
    [("serviceMonitor", "endpoints", "service"), ("podMonitor", "podMetricsEndpoints", "pod")],
)
def test_vllms_own_metrics_are_scraped_without_those_that_the_worker_counts(block, ends, meta):
    manifests = render(merged(EXAMPLE, **{block: {"enabled": True}}))
    (monitor,) = of_kind(manifests, block[0].upper() + block[1:])
    own, engine = monitor["spec"][ends]
    assert (own["path"], engine["path"], engine["port"]) == ("/metrics", "/metrics/engine", own["port"])
    (kept,) = engine["relabelings"]
    component_label = f"__meta_kubernetes_{meta}_label_app_kubernetes_io_component"
    assert kept["sourceLabels"] == [component_label, f"__meta_kubernetes_{meta}_label_triptych_pool"]
    pools = [one for one in workloads(manifests) if component(one) in ("pd", "encoder")]
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in pools]
    scraped = [f"{one['app.kubernetes.io/component']};{one['triptych/pool']}" for one in labels]
    assert [bool(re.fullmatch(kept["regex"], one)) for one in scraped] == [
        one[:3] == "pd;" for one in scraped
    ]

    (dropped,) = engine["metricRelabelings"]
    names = [name for one in documented() for name in one.series if name.startswith("vllm:")]
    left = {name for name in names if not re.fullmatch(dropped["regex"], name)}
    # What a worker before vLLM shows as 0.
    alone = {f"vllm:iteration_tokens_total_{end}" for end in ("bucket", "sum", "count")}
    assert left == alone | {"vllm:kv_cache_usage_perc", "vllm:num_preemptions_total"}


def test_native_pools_have_no_page_of_an_engine():
    (monitor,) = of_kind(render({"podMonitor": {"enabled": True}}), "PodMonitor")
    assert [end["path"] for end in monitor["spec"]["podMetricsEndpoints"]] == ["/metrics"]


NIXL = {
    "pd": {"vllm": EXAMPLE["pd"]["vllm"] | {"kvConnector": "nixl"}},
    "pdPools": [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}],
}


def test_servers_of_prefill_and_decode_pools_reach_each_other_by_nixl_and_nobody_else_does() -> None:
    rendered = render(merged(EXAMPLE, **NIXL))
    for manifest in (one for one in workloads(rendered) if component(one) == "pd"):
        server, words = named(manifest, "vllm"), main_container(manifest)["args"]
        transfer = json.loads(server["args"][server["args"].index("--kv-transfer-config") + 1])
        role = words[words.index("--role") + 1]
        assert transfer == transfer_config(role), "as a server of the worker's own"
        (host,) = [one for one in server["env"] if one["name"] == "VLLM_NIXL_SIDE_CHANNEL_HOST"]
        assert host["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        assert words[words.index("--kv-connector") + 1] == "nixl"
    (policy,) = [one for one in of_kind(rendered, "NetworkPolicy") if component(one) == "pd"]
    pods = policy["spec"]["podSelector"]
    assert {"from": [{"podSelector": pods}]} in policy["spec"]["ingress"]
    assert {"to": [{"podSelector": pods}]} in policy["spec"]["egress"]


def test_worker_and_connector_try_a_class_together() -> None:
    tried = {"pd": {"vllm": EXAMPLE["pd"]["vllm"] | {"engineClass": "generic"}}}
    for values, expected in ((EXAMPLE, None), (merged(EXAMPLE, **tried), "generic")):
        (manifest,) = [one for one in workloads(render(values)) if component(one) == "pd"]
        words = main_container(manifest)["args"]
        assert ("--engine-class" in words) is (expected is not None)
        assert expected is None or words[words.index("--engine-class") + 1] == expected
        environment = {one["name"]: one.get("value") for one in named(manifest, "namespace")["env"]}
        options = json.loads(environment["EC_TRANSFER"])["ec_connector_extra_config"]
        assert options.get("engine_class") == expected


def test_without_a_connector_no_port_of_pd_workers_is_open_to_each_other() -> None:
    (policy,) = [one for one in of_kind(render(EXAMPLE), "NetworkPolicy") if component(one) == "pd"]
    assert all(rule.get("ports") for way in ("ingress", "egress") for rule in policy["spec"][way])


def plain(word: str) -> Any:
    return json.loads(word) if word.startswith("{") else word


def test_server_and_worker_of_a_pool_are_given_its_adapters_by_the_same_names() -> None:
    adapters = {"sql": "adapters/sql", "team/chat": "chat"}
    lora = EXAMPLE["pd"]["vllm"] | {"loraModules": adapters, "maxLoraRank": 64}
    manifest = next(
        one for one in workloads(render(merged(EXAMPLE, pd={"vllm": lora}))) if component(one) == "pd"
    )
    server, words = named(manifest, "vllm")["args"], main_container(manifest)["args"]
    at = server.index("--enable-lora")
    expected = [Adapter(name, Path("/model", folder), 64, "") for name, folder in adapters.items()]
    given = lora_flags(expected, "cuda")
    assert [plain(word) for word in server[at : at + len(given)]] == [plain(word) for word in given]
    modules = [words[place + 1] for place, word in enumerate(words) if word == "--lora-modules"]
    assert parse_modules(",".join(modules)) == {one.name: one.path for one in expected}


def test_without_adapters_no_server_is_started_for_them() -> None:
    manifest = next(one for one in workloads(render(EXAMPLE)) if component(one) == "pd")
    words = [*named(manifest, "vllm")["args"], *main_container(manifest)["args"]]
    assert not {"--enable-lora", "--lora-modules"} & set(words)


@pytest.mark.parametrize("adapters", [{"a b": "x"}, {"a": "/x"}, {"a": "../x"}, {"a": ""}, {"-a": "x"}])
def test_what_is_no_name_or_folder_below_the_model_is_refused(adapters) -> None:
    lora = EXAMPLE["pd"]["vllm"] | {"loraModules": adapters}
    with pytest.raises(HelmError, match="loraModules|invalid propertyName"):
        render(merged(EXAMPLE, pd={"vllm": lora}))


def test_a_pools_server_is_given_how_to_speculate_and_its_worker_is_not() -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    values = merged(EXAMPLE, pd={"vllm": EXAMPLE["pd"]["vllm"] | {"speculativeConfig": drafts}})
    manifest = next(one for one in workloads(render(values)) if component(one) == "pd")
    server = named(manifest, "vllm")["args"]
    assert json.loads(server[server.index("--speculative-config") + 1]) == drafts
    assert "--speculative-config" not in main_container(manifest)["args"]

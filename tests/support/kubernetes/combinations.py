"""Values of the chart in combinations: every pair of what some fifty of them may be occurs in a row."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from functools import reduce
from importlib.metadata import version
from pathlib import Path
from typing import Any

from allpairspy import AllPairs  # type: ignore[import-untyped]

Values = Mapping[str, Any]

#: Secrets that the values below name, with the keys that the README asks of them.
GIVEN = {
    "roles": frozenset({"proxy", "encoder", "pd", "colocated", "vllm", "users.acl"}),
    "passwords": frozenset({"password"}),
    "certificates": frozenset({"tls.crt", "tls.key", "ca.crt"}),
    "keys": frozenset({"keys"}),
    "tokens": frozenset({"token"}),
    "urls": frozenset({"url"}),
    "hub": frozenset({"token"}),
}
_DOWNLOAD = {"id": "a/b", "revision": "v1", "tokenSecret": {"name": "hub"}}
_SCALED = {"name": "a", "autoscale": {"min": 1, "max": 4}}
_SERVER = {"image": "registry.example/vllm:1", "hostMemory": "2Gi"}
_ENGINE = {"engine": "vllm", "vllm": _SERVER}
#: PD workers in front of vLLM, and encoders that save what it reads.
VLLM: Values = {"pd": _ENGINE, "encoder": {"args": ["--dtype", "bfloat16"]}}
_FOUR = {"requests": {"cpu": "4", "memory": "4Gi"}, "limits": {"memory": "4Gi"}}
_ISSUER = {"issuerRef": {"name": "ca"}}
_URL = "rediss://redis.example:6380/0"


def _model(source: str, **values: Any) -> Values:
    return {"model": {"source": source, "name": "m", **values}}


def _external(secret: str, *, acl: bool = True, **external: Any) -> Values:
    return {"store": {"mode": "external", "acl": acl, "existingSecret": secret, "external": external}}


def _switch(block: str) -> list[Values]:
    return [{block: {"enabled": True}}, {block: {"enabled": False}}]


#: What each value, or group of values that belong together, may be. {} is the default.
CHOICES: Mapping[str, list[Values]] = {
    "fullnameOverride": [{}, {"fullnameOverride": "blue"}],
    "commonLabels": [{}, {"commonLabels": {"team": "x"}}],
    "ipFamily": [{}, {"ipFamily": "ipv6"}],
    "image.registry": [{}, {"image": {"registry": "registry.example/x", "pullSecrets": ["r"]}}],
    "model.source": [
        _model("demo"),
        _model("pvc", pvc={"existingClaim": "c"}),
        _model("pvc", pvc={"accessModes": ["ReadWriteMany"], "storageClass": "nfs"}),
        _model("image", image={"reference": "registry.example/m:1"}),
        _model("download", download=_DOWNLOAD),
        _model("download", download=_DOWNLOAD, pvc={"accessModes": ["ReadWriteMany"], "storageClass": "nfs"}),
        _model("download", download=_DOWNLOAD, pvc={"existingClaim": "c"}),
        _model("container", container={"image": "registry.example/aws:2", "args": ["s3", "sync"]}),
    ],
    "model.path": [{}, {"model": {"path": "x"}}],
    "model.revision": [{}, {"model": {"revision": "v7"}}],
    "logFormat": [{}, {"logFormat": "json"}],
    "logLevel": [{}, {"logLevel": "debug"}],
    "tracing": [{}, {"tracing": {"endpoint": "https://collector.example:4318"}}],
    "proxy.replicas": [{}, {"proxy": {"replicas": 1}}, {"proxy": {"autoscale": {"min": 2, "max": 5}}}],
    "proxy.requestTimeout": [
        {"proxy": {"requestTimeout": 300, "terminationGracePeriodSeconds": 360}},
        {"proxy": {"requestTimeout": 1800, "terminationGracePeriodSeconds": 1860}},
        {"proxy": {"requestTimeout": 20, "terminationGracePeriodSeconds": 80}},
    ],
    "proxy.trustedProxies": [
        {},
        {"proxy": {"trustedProxies": ["10.9.0.0/16", "10.8.0.0/16"], "proxyProtocol": True}},
        {"proxy": {"trustedProxies": ["10.9.0.0/16"], "unknownFields": "reject", "storeWait": 0.5}},
        {"proxy": {"prefillThreshold": 0}},
    ],
    "proxy.allowedHosts": [{}, {"proxy": {"allowedHosts": ["gateway.example", "10.0.0.1"]}}],
    "proxy.preStopSeconds": [{}, {"proxy": {"preStopSeconds": 0}}, {"proxy": {"preStopSeconds": 40}}],
    "proxy.service": [{}, {"proxy": {"service": {"type": "LoadBalancer"}}}],
    "proxy.frontDoorTls": [
        {},
        {"proxy": {"frontDoorTls": {"existingSecret": "certificates"}}},
        {"proxy": {"frontDoorTls": {"certManager": _ISSUER, "hosts": ["m.example"]}}},
    ],
    "proxy.resources": [
        {},
        {"proxy": {"resources": {"limits": {"cpu": 2}}}},
        {"proxy": {"resources": {"requests": {"cpu": 4, "memory": "4Gi"}}}},
    ],
    "proxy.spoolSize": [{}, {"proxy": {"spoolSize": "1Gi"}}],
    "proxy.podLabels": [{}, {"proxy": {"podLabels": {"a": "b"}, "podAnnotations": {"c": "d"}}}],
    "pools": [
        {},
        {"encoderPools": [{"name": "a"}, {"name": "b", "device": "cuda"}], "pdPools": [{"name": "a"}]},
        {"encoderPools": [], "pdPools": [], "colocatedPools": [{"name": "a"}]},
        {"colocatedPools": [{"name": "a", "device": "cuda"}]},
        {"encoderPools": [_SCALED], "pdPools": [_SCALED], "autoscaling": {"engine": "keda"}},
        {"encoderPools": [_SCALED, {"name": "b"}], "pdPools": [_SCALED], "autoscaling": {"engine": "hpa"}},
    ],
    "encoder.device": [{}, {"encoder": {"device": "cuda"}}],
    "encoder.dataParallel": [{}, {"encoder": {"dataParallel": 2}}],
    "encoder.maxDecodeSeconds": [{}, {"encoder": {"maxDecodeSeconds": 2.5}}],
    "encoder.storeRows": [{}, {"encoder": {"storeRows": "int8"}}],
    "encoder.replicas": [{}, {"encoder": {"replicas": 4}}],
    "encoder.resources": [
        {},
        {"encoder": {"resources": {"requests": {"cpu": "8", "memory": "9Gi"}, "limits": {"memory": "9Gi"}}}},
        {"encoder": {"resources": {"requests": {"cpu": "500m"}, "limits": {"cpu": 2.5}}}},
    ],
    "encoder.place": [
        {},
        {"encoder": {"numa": True, "nearPd": "preferred"}},
        {
            "encoder": {"hostNetwork": True, "ports": {"grpc": 7001}},
            "networkPolicy": {"nodes": ["10.0.0.0/16"]},
        },
    ],
    "encoder.preStopSeconds": [{}, {"encoder": {"preStopSeconds": 20}}],
    "pd.device": [{}, {"pd": {"device": "cuda"}}],
    "pd.tensorParallel": [{}, {"pd": {"tensorParallel": 2}}],
    "pd.engine": [{}, VLLM, {**VLLM, "pd": _ENGINE | {"vllm": _SERVER | {"cacheClaim": "compiled"}}}],
    "pd.encoder": [{}, {"pd": {"encoder": {"resources": _FOUR}}}],
    "pd.place": [{}, {"pd": {"numa": True, "rdma": {"resource": "rdma/hca", "lockMemory": True}}}],
    "pd.schemas": [{}, {"pd": {"schemas": "open"}}],
    "pd.linearKernel": [{}, {"pd": {"linearKernel": "onednn"}}],
    "pd.sharePrefixes": [{}, {"pd": {"sharePrefixes": "auto"}}],
    "pd.kvConnector": [{}, {**VLLM, "pd": _ENGINE | {"vllm": _SERVER | {"kvConnector": "nixl"}}}],
    "pd.engineClass": [{}, {**VLLM, "pd": _ENGINE | {"vllm": _SERVER | {"engineClass": "generic"}}}],
    "pd.loraModules": [{}, {**VLLM, "pd": _ENGINE | {"vllm": _SERVER | {"loraModules": {"sql": "a/sql"}}}}],
    "pd.speculativeConfig": [
        {},
        {**VLLM, "pd": _ENGINE | {"vllm": _SERVER | {"speculativeConfig": {"a": 1}}}},
    ],
    "pd.role": [{}, {"pdPools": [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}]}],
    "pd.resources": [
        {},
        {"pd": {"resources": {"requests": {"cpu": 16, "memory": "64Gi"}, "limits": {"memory": "64Gi"}}}},
        {"pd": {"resources": {"limits": {"cpu": "8"}}}},
    ],
    "pd.shmSize": [{}, {"pd": {"shmSize": "3Gi", "scratchSize": "10Gi"}}],
    "pd.runtimeClassName": [{}, {"pd": {"runtimeClassName": "nvidia", "priorityClassName": "high"}}],
    "pd.terminationGracePeriodSeconds": [{}, {"pd": {"terminationGracePeriodSeconds": 40}}],
    "store": [
        {},
        {"store": {"existingSecret": "roles"}},
        _external("roles", url=_URL, caSecret="certificates"),
        _external("passwords", acl=False, url=_URL, clientSecret="certificates"),
        _external("passwords", acl=False, urlSecret={"name": "urls"}),
        _external("", url=_URL),
        _external("", url="redis+sentinel://a:7000,b/primary/0"),
    ],
    "store.resources": [
        {},
        {"store": {"resources": {"limits": {"memory": "40Gi", "cpu": 4}}}},
        {"store": {"resources": {"requests": {"memory": "32Gi"}}}},
    ],
    "store.maxMemory": [{}, {"store": {"maxMemory": "24Gi"}}],
    "apiKeys": [{}, {"apiKeys": {"existingSecret": "keys"}}, {"apiKeys": {"enabled": False}}],
    "internalToken": [{}, {"internalToken": {"existingSecret": "tokens"}}],
    "tls": [
        {},
        {"tls": {"enabled": False}},
        {"tls": {"existingSecret": "certificates"}},
        {"tls": {"certManager": _ISSUER}},
    ],
    "networkPolicy": _switch("networkPolicy"),
    "networkPolicy.clients": [{}, {"networkPolicy": {"clients": [{"podSelector": {}}]}}],
    "networkPolicy.internet": [{}, {"networkPolicy": {"internet": {"enabled": False}}}],
    "networkPolicy.dns": [{}, {"networkPolicy": {"dns": {"to": []}}}],
    "monitors": [{}, {"serviceMonitor": {"enabled": True}}, {"podMonitor": {"enabled": True}}],
    "dashboards": _switch("dashboards"),
    "prometheusRules": _switch("prometheusRules"),
    "gatewayApi": [
        {},
        {"gatewayApi": {"enabled": True, "parentRefs": [{"name": "g"}], "requestTimeout": "31m"}},
        {"gatewayApi": {"enabled": True, "parentRefs": [{"name": "g"}], "requestTimeout": "0s"}},
    ],
    "ingress": [{}, {"ingress": {"enabled": True, "hosts": ["m.example"], "tlsSecret": "certificates"}}],
    "inferencePool": [{}, {"inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}}}],
    "pdb": _switch("pdb"),
    "topologySpread": _switch("topologySpread"),
    "podSecurity": [{}, {"podSecurity": {"runAsUser": None, "storeUser": None}}],
    "serviceAccount": [{}, {"serviceAccount": {"create": False}}],
    "extraEnv": [{}, {"extraEnv": [{"name": "A", "value": "b"}]}],
}


def rows() -> list[dict[str, Any]]:
    """Values for as many releases as hold every pair of choices that the chart does not refuse."""
    return [reduce(merged, row, {}) for row in _pairs()]


def _pairs() -> list[list[Values]]:
    """The rows of choices, kept per state of this file: they take seconds, and every test process asks."""
    digest = hashlib.sha256(Path(__file__).read_bytes() + version("allpairspy").encode()).hexdigest()[:16]
    kept = Path(tempfile.gettempdir()) / f"triptych-pairs-{os.getuid()}-{digest}.json"
    if not kept.is_file():
        found = [list(row) for row in AllPairs(list(CHOICES.values()), filter_func=_renders)]
        with tempfile.NamedTemporaryFile("w", dir=kept.parent, prefix=kept.stem, delete=False) as aside:
            json.dump(found, aside)
        Path(aside.name).rename(kept)
    rows: list[list[Values]] = json.loads(kept.read_text())
    return rows


def merged(first: Values, second: Values) -> dict[str, Any]:
    """The values of both, as Helm merges two files: objects key by key."""
    both = dict(first)
    for key, value in second.items():
        old = both.get(key)
        both[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both


def _renders(row: list[Values]) -> bool:
    """Whether the chart takes the first choices of a row, as vLLM needs a checkpoint and store.external.url.

    Asked some ten thousand times, so without merging the row.
    """
    on_vllm = any(one.get("pd", {}).get("engine") == "vllm" for one in row)
    demo = any(one.get("model", {}).get("source") == "demo" for one in row)
    hidden = any("urlSecret" in one.get("store", {}).get("external", {}) for one in row)
    # Two pools of encoders would have the same ports of a node, and half a CPU is not of one NUMA node.
    host = any(one.get("encoder", {}).get("hostNetwork") for one in row)
    several = any(len(one.get("encoderPools", ())) > 1 for one in row)
    numa = any(one.get("encoder", {}).get("numa") for one in row)
    halves = any("500m" in str(one.get("encoder", {}).get("resources")) for one in row)
    return not (on_vllm and (demo or hidden) or host and several or numa and halves)

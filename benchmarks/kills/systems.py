"""The systems whose parts are killed, as commands on loopback: ours, native or before vLLM, and vLLM's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.against_peer.rounds import ROOT, peer_environment
from benchmarks.kills.processes import Service
from triptych.apps.launch.embedded_store import find_server_binary
from triptych_bench.goodput.launch import free_ports

TOKEN = "kills-" + "t" * 32
ENCODER, DECODER, PREFILL = "encoder", "decoding server", "prefill server"
WORKER, STORE, PROXY, EMBEDDINGS = "worker before vLLM", "store", "proxy", "embeddings"
DTYPE = ("--dtype", "float32")
#: Without compilation, so that it starts and is back sooner.
_LIMITS = (
    "--enforce-eager",
    "--max-model-len",
    "4096",
    "--max-num-seqs",
    "16",
    "--limit-mm-per-prompt",
    '{"image":8,"video":0}',
)


@dataclass(frozen=True, slots=True)
class System:
    """Its services, where clients ask, the name that they give, and services by what is said of them.

    `files`: a folder whose loss is that of all embeddings.
    """

    services: list[Service]
    url: str
    model: str
    parts: Mapping[str, str]
    restarts: bool = True
    files: Path | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """The kit's folder, and one for this system's files."""

    peer: Path
    folder: Path
    ports: list[int] = field(default_factory=lambda: free_ports(6))

    @property
    def model(self) -> str:
        return str(self.peer / "models" / "tiny")

    def ours(self, *words: str, name: str = "") -> Service:
        """A command of ours, with the cluster's token; its first word is its name unless one is given."""
        command = [sys.executable, "-m", "triptych.apps.cli", *words, "--log-level", "warning"]
        env = {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "TRIPTYCH_INTERNAL_TOKEN": TOKEN}
        return Service(name or words[0], command, env)

    def vllm(self, name: str, port: int, core: int, *words: str, **env: str) -> Service:
        """A `vllm serve` of the kit on one core."""
        command = [str(self.peer / "venv" / "bin" / "vllm"), "serve", self.model, "--host", "127.0.0.1"]
        command += ["--port", str(port), *DTYPE, *_LIMITS, *words]
        return Service(name, command, self.vllm_env(core) | env)

    def vllm_env(self, core: int = 0) -> dict[str, str]:
        return {
            "PATH": f"{self.peer}/venv/bin:{os.environ['PATH']}",
            "PYTHONPATH": "",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(core),
            "LD_PRELOAD": peer_environment(self.peer)["PEER_PRELOAD"],
        }


def common_services(place: Place, *proxy_words: str) -> tuple[list[Service], str, str]:
    """Store, encoder worker and proxy of each of our systems, and the addresses of store and proxy."""
    store, proxy = f"redis://127.0.0.1:{place.ports[0]}/0", place.ports[1]
    server = [str(find_server_binary()), "--port", str(place.ports[0]), "--bind", "127.0.0.1", "--save", ""]
    server += ["--maxmemory", "512mb", "--maxmemory-policy", "volatile-lru", "--dir", str(place.folder)]
    services = [
        Service("store", server),
        place.ours("encoder", place.model, *DTYPE, "--threads", "1", "--store", store),
        place.ours("proxy", "--port", str(proxy), "--grpc-port", "0", "--store", store, *proxy_words),
    ]
    return services, store, f"http://127.0.0.1:{proxy}"


_NATIVE = ("--threads", "1", "--kv-memory", "1GiB")
_OURS = {ENCODER: "encoder", STORE: "store", PROXY: "proxy"}


def native(place: Place) -> System:
    services, store, url = common_services(place)
    services.append(place.ours("pd", place.model, *DTYPE, *_NATIVE, "--store", store))
    return System(services, url, "", {**_OURS, DECODER: "pd"})


def native_epd(place: Place) -> System:
    """Encode, prefill and decode apart: every prompt is computed by one worker and continued by the other."""
    services, store, url = common_services(place, "--prefill-threshold", "0")
    for role in ("prefill", "decode"):
        words = ("pd", place.model, *DTYPE, *_NATIVE, "--role", role, "--store", store)
        services.append(place.ours(*words, name=role))
    return System(services, url, "", {**_OURS, PREFILL: "prefill", DECODER: "decode"})


def fed_vllm(
    place: Place,
    name: str,
    port: int,
    core: int,
    store: str,
    *words: str,
    paths: Sequence[Path] = (),
    **env: str,
) -> Service:
    """A `vllm serve` that takes its embeddings from the store, for a worker of ours before it.

    `paths`: further folders that it imports from.
    """
    command = [sys.executable, "-m", "triptych.apps.cli", "namespace", place.model, *DTYPE]
    namespace = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    token = place.folder / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    transfer = {
        "ec_connector": "TriptychECConnector",
        "ec_connector_module_path": "triptych.integrations.vllm",
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": {
            "store": store, "namespace": namespace, "wait_seconds": 2, "internal_token_file": str(token),
        },
    }  # fmt: skip
    words = "--enable-scale-out", "--enable-mm-embeds", "--enable-prompt-tokens-details", *words
    path = os.pathsep.join(map(str, (ROOT, place.peer / "packages", *paths)))
    return place.vllm(
        name, port, core, *words, "--ec-transfer-config", json.dumps(transfer), PYTHONPATH=path, **env
    )


def before_vllm(place: Place) -> System:
    services, store, url = common_services(place)
    port = place.ports[2]
    services.append(fed_vllm(place, "vllm", port, 1, store))
    engine = ("--engine", "vllm", "--engine-url", f"http://127.0.0.1:{port}")
    services.append(place.ours("pd", place.model, *DTYPE, *engine, "--store", store))
    return System(services, url, "", {**_OURS, DECODER: "vllm", WORKER: "pd"})


def _vllm_epd(place: Place, *, restarts: bool) -> System:
    files = place.folder / "embeddings"
    files.mkdir()
    encoder, decoder, proxy = place.ports[:3]

    def transfer(role: str) -> tuple[str, str]:
        extra = {"shared_storage_path": str(files)}
        config = {"ec_connector": "ECExampleConnector", "ec_role": role, "ec_connector_extra_config": extra}
        return "--ec-transfer-config", json.dumps(config)

    encodes = ("--no-enable-prefix-caching", "--max-num-batched-tokens", "16384")
    ids = "--enable-request-id-headers"
    urls = [f"http://127.0.0.1:{port}" for port in (encoder, decoder)]
    python, joined = str(place.peer / "venv/bin/python"), str(place.peer / "epd_proxy.py")
    services = [
        place.vllm("encoder", encoder, 0, *encodes, ids, *transfer("ec_producer")),
        place.vllm("pd", decoder, 1, ids, "--enable-mm-embeds", *transfer("ec_consumer")),
        Service("proxy", [python, joined, str(proxy), *urls], place.vllm_env()),
    ]
    parts = {ENCODER: "encoder", DECODER: "pd", PROXY: "proxy"}
    return System(services, f"http://127.0.0.1:{proxy}", place.model, parts, restarts, files)


def vllm_epd(place: Place) -> System:
    return _vllm_epd(place, restarts=True)


def vllm_epd_alone(place: Place) -> System:
    return _vllm_epd(place, restarts=False)


def vllm_pd(place: Place) -> System:
    """Prefill and decode apart, KV by NIXL over UCX; both encode, as vLLM has no E|P|D of these two parts."""
    prefill, decode, proxy = place.ports[:3]

    def words(role: str) -> tuple[str, str]:
        kv = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
        return "--kv-transfer-config", json.dumps(kv)

    services = [
        place.vllm(name, port, core, *words(role), VLLM_NIXL_SIDE_CHANNEL_PORT=str(side))
        for name, role, port, core, side in (
            ("prefill", "kv_producer", prefill, 0, place.ports[3]),
            ("decode", "kv_consumer", decode, 1, place.ports[4]),
        )
    ]
    urls = [f"http://127.0.0.1:{port}" for port in (prefill, decode)]
    command = [sys.executable, "-m", "benchmarks.kills.pd_proxy", str(proxy), *urls]
    services.append(Service("proxy", command, {"PYTHONPATH": str(ROOT)}))
    parts = {PREFILL: "prefill", DECODER: "decode", PROXY: "proxy"}
    return System(services, f"http://127.0.0.1:{proxy}", place.model, parts)


#: What a round measures first is worth most, should its time not suffice.
SYSTEMS = {
    "native": native,
    "native-epd": native_epd,
    "vllm-epd": vllm_epd,
    "vllm-pd": vllm_pd,
    "before-vllm": before_vllm,
    "vllm-epd-alone": vllm_epd_alone,
}

"""The systems: vLLM servers alone, and behind our proxy with our encoder workers and store.

Their words are those of the baselines' `vllm`, so that all servers of vLLM differ only in what is said here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from benchmarks.against_peer.rounds import PEER_SYSTEMS, ROOT
from benchmarks.baselines.matrix import Matrix, System
from triptych.apps.launch.embedded_store import find_server_binary
from triptych.base.errors import ConfigError

_START_SECONDS = 600.0
_DTYPES = {"tiny": "float32", "small": "bfloat16"}
_STORE = "unix://${SCRATCH}/store.sock"
_NAMESPACE_SECONDS = 300.0
#: Of every server's KV cache: all systems are up at once.
_MEMORY, _GIB = "VLLM_CPU_KVCACHE_SPACE", "1"
#: Two servers: the name of each one's port, and its core.
_REPLICA_CORES = (("FIRST", "0"), ("SECOND", "1"))
#: Without the second one the folder that this runs in would come before the tree.
_OF_THIS_TREE = {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}


class Parts:
    """Commands of the processes that systems are made of. `packages` is put on vLLM's PYTHONPATH."""

    def __init__(self, matrix: Matrix, packages: Path, namespace: str) -> None:
        self._vllm = matrix.named("vllm")
        self._dtype = ("--dtype", _DTYPES[matrix.name])
        self._packages = packages
        self._namespace = namespace

    def vllm(self, port: str, cores: str, role: str = "") -> tuple[str, ...]:
        """A server of vLLM on `cores`; a `role` loads our connector, and opens what our PD worker needs."""
        environment = self._vllm.env | {_MEMORY: _GIB, "VLLM_CPU_OMP_THREADS_BIND": cores}
        words = [word.replace("${PORT}", f"${{{port}}}") for word in self._vllm.commands[0]]
        if role:
            environment["PYTHONPATH"] = f"{ROOT}:{self._packages}"
            words += ["--enable-mm-embeds", "--enable-scale-out", "--enable-prompt-tokens-details"]
            words += ["--ec-transfer-config", json.dumps(self._transfer(role))]
        return ("env", *(f"{name}={value}" for name, value in environment.items()), *words)

    def _transfer(self, role: str) -> dict[str, object]:
        extra = {"store": _STORE, "namespace": self._namespace, "wait_seconds": 2, "trusted_front_door": True}
        return {
            "ec_connector": "TriptychECConnector",
            "ec_connector_module_path": "triptych.integrations.vllm",
            "ec_role": role,
            "ec_connector_extra_config": extra,
        }

    def store(self) -> tuple[str, ...]:
        words = (str(find_server_binary()), "--port", "0", "--unixsocket", "${SCRATCH}/store.sock")
        return (*words, "--dir", "${SCRATCH}", "--save", "", "--maxmemory", "1gb") + (
            "--maxmemory-policy",
            "volatile-lru",
        )

    def encoder(self, *words: str) -> tuple[str, ...]:
        return self._service("encoder", "${MODEL}", *self._dtype, "--threads", "1", *words)

    def modest_encoder(self) -> tuple[str, ...]:
        """It takes what vLLM leaves: each thread of vLLM's that it delayed would keep the others waiting."""
        return ("nice", "-n", "19", *self.encoder())

    def pd(self, port: str) -> tuple[str, ...]:
        """Our PD worker in front of the server at `port`."""
        url = f"http://127.0.0.1:${{{port}}}"
        return self._service("pd", "${MODEL}", *self._dtype, "--engine", "vllm", "--engine-url", url)

    def proxy(self) -> tuple[str, ...]:
        return self._service("proxy", "--port", "${PORT}", "--grpc-port", "${GRPC_PORT}")

    def _service(self, *words: str) -> tuple[str, ...]:
        command = (sys.executable, "-m", "triptych.apps.cli", *words, "--store", _STORE)
        # Systems are stopped while others are measured, which a watchdog would take for a hang.
        return (*command, "--log-level", "warning", "--stall-timeout", "0")


def systems_of(matrix: Matrix, parts: Parts) -> dict[str, System]:
    """All systems by name. Two cores, 0 and 1, are shared by all processes of a system."""
    found = {name: _with_memory(matrix.named(name)) for name in PEER_SYSTEMS}
    ours = [parts.store(), parts.proxy(), parts.modest_encoder()]
    single = [*ours, parts.vllm("FIRST", "0-1", "ec_consumer"), parts.pd("FIRST")]
    pinned = [parts.store(), parts.proxy(), parts.encoder("--cpus", "0")]
    pinned += [parts.vllm("FIRST", "1", "ec_consumer"), parts.pd("FIRST")]
    both = [parts.vllm(port, core, "ec_consumer") for port, core in _REPLICA_CORES]
    fronts = [parts.pd(port) for port, _ in _REPLICA_CORES]
    found["triptych"] = _ours("triptych", single, ("FIRST",))
    found["triptych-pinned"] = _ours("triptych-pinned", pinned, ("FIRST",))
    found["replicas-triptych"] = _ours("replicas-triptych", [*ours, *both, *fronts], ("FIRST", "SECOND"))
    found["replicas"] = _replicas("replicas", [parts.vllm(p, core) for p, core in _REPLICA_CORES])
    sharing = [parts.vllm(port, core, "ec_both") for port, core in _REPLICA_CORES]
    shared = _replicas("replicas-store", [parts.store(), *sharing])
    found["replicas-store"] = structs.replace(shared, env=_OF_THIS_TREE)
    return found


def _with_memory(system: System) -> System:
    """A system of the baselines with as much memory for its KV caches as all others here."""
    commands = tuple(
        tuple(f"{_MEMORY}={_GIB}" if word.startswith(f"{_MEMORY}=") else word for word in command)
        for command in system.commands
    )
    environment = system.env | ({_MEMORY: _GIB} if _MEMORY in system.env else {})
    return structs.replace(system, commands=commands, env=environment, timeout=_START_SECONDS)


def _ours(name: str, commands: Sequence[tuple[str, ...]], servers: Sequence[str]) -> System:
    return System(
        name=name,
        commands=tuple(commands),
        url="http://127.0.0.1:${PORT}",
        ports=("PORT", "GRPC_PORT", *servers),
        env=_OF_THIS_TREE,
        ready=(*(f"http://127.0.0.1:${{{port}}}/health" for port in servers), "/ready"),
        timeout=_START_SECONDS,
        pause=True,
    )


def _replicas(name: str, commands: Sequence[tuple[str, ...]]) -> System:
    urls = [f"http://127.0.0.1:${{{port}}}" for port, _ in _REPLICA_CORES]
    return System(
        name=name,
        commands=tuple(commands),
        url=",".join(urls),
        ports=tuple(port for port, _ in _REPLICA_CORES),
        ready=tuple(f"{url}/health" for url in urls),
        timeout=_START_SECONDS,
        pause=True,
    )


def namespace_of(matrix: Matrix) -> str:
    """The namespace of our encoder workers; ConfigError where the checkpoint is none."""
    command = [sys.executable, "-m", "triptych.apps.cli", "namespace", matrix.model]
    done = subprocess.run(
        [*command, "--dtype", _DTYPES[matrix.name]],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=_NAMESPACE_SECONDS,
    )
    if done.returncode:
        raise ConfigError(f"{matrix.model} has no namespace: {done.stderr.strip()[-500:]}")
    return done.stdout.strip()

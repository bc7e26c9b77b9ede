"""Our encoders, store and proxy in front of vLLM servers, against vLLM alone: in turns, on the same cores.

    python -m benchmarks vllm_fleet PEER --packages PACKAGES --results DIR [--systems NAMES]
    python -m benchmarks vllm_fleet --results DIR --write

PEER is the kit that `against_peer` takes: models/, a virtual environment venv/ with vLLM's CPU build, and
epd_proxy.py. PACKAGES has what our connector needs beside vLLM, made by `pip install --target PACKAGES redis
hiredis msgpack xxhash`. Every run appends to DIR: what a run has no time for, the next one measures with
--first. Without PEER the page is made of DIR.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

from msgspec import structs

from benchmarks.against_peer.__main__ import machine_lines, medians, model_tables
from benchmarks.against_peer.loads import Load, Turn, quiet
from benchmarks.against_peer.rounds import (
    MODELS,
    PEER_SYSTEMS,
    REPLICA_PORTS,
    ROOT,
    Rounds,
    matrix_of,
    publish_turns,
    turns_parser,
    vllm_replicas,
    vllm_server,
)
from benchmarks.baselines.matrix import Matrix, System
from benchmarks.baselines.runner import run_command
from benchmarks.result_page import RESULTS, fill
from triptych.apps.launch.embedded_store import find_server_binary
from triptych.base.errors import ConfigError
from triptych.goodput.measure.slo import preset
from triptych.goodput.report.display import Display
from triptych.models.identity import model_identity

COMMAND = "python -m benchmarks vllm_fleet PEER --packages PACKAGES --results DIR"
_PAIRS = (
    ("triptych", "vllm-epd"),
    ("triptych", "vllm"),
    ("triptych-pinned", "vllm-epd"),
    ("vllm-epd", "vllm"),
    ("replicas-triptych", "replicas"),
)
#: Ours and theirs of the targets, by the beginning of their names.
_TARGETS = {
    "our encoders before vLLM by vLLM's EPD": ("triptych", "vllm-epd"),
    "two vLLM on our store by the two alone": ("replicas-triptych", "replicas"),
}


def page(turns: Sequence[Turn], versions: str) -> str:
    """`versions` of what was measured."""
    kept = quiet(turns)
    lines = ["# Before a vLLM fleet", "", *machine_lines(COMMAND, kept, len(turns)), versions, ""]
    return "\n".join([*lines, fill("vllm_fleet"), *model_tables(kept, LOADS, _PAIRS), ""])


def reached(turns: Sequence[Turn]) -> dict[str, dict[str, float]]:
    """The figures of the targets that these turns answer, by the target's name."""
    result = {
        f"{target}, {model}, {load.name}": medians(quiet(turns), model, load, systems, ("req/s",))
        for target, systems in _TARGETS.items()
        for model, load in product(MODELS, LOADS)
    }
    return {name: figures for name, figures in result.items() if figures}


#: 64 output tokens each; photographs of 320 x 320.
WORKLOADS = {
    f"{name}-{reuse}": replace(preset(name).workload, reuse=reuse / 100, content="photos")
    for name, reuse in product(("image", "images-4"), (0, 50, 90))
}
LOADS = tuple(Load(name, 8) for name in WORKLOADS)

RESULT = RESULTS / "vllm_fleet.md"
_VERSIONS = "versions.txt"


def main(arguments: list[str] | None = None) -> int:
    parser = turns_parser(__doc__, RESULT, model="tiny", systems="triptych,vllm-epd,vllm")
    parser.add_argument(
        "--packages", type=Path, help="folder with redis, hiredis, msgpack and xxhash for vLLM"
    )
    return run_command(partial(_measure, parser.parse_args(arguments)))


def _measure(options: argparse.Namespace, display: Display) -> bool:
    if options.peer is None:
        versions = options.results / _VERSIONS
        page_ = partial(page, versions=versions.read_text() if versions.exists() else "")
        return publish_turns(options, page_, reached, RESULT)
    if options.packages is None or not (options.packages / "redis").is_dir():
        raise ConfigError(
            f"--packages {options.packages}: give the folder in which vLLM finds redis, made by "
            "pip install --target FOLDER redis hiredis msgpack xxhash"
        )
    peer = options.peer.resolve()
    matrix = matrix_of(options.model, peer)
    namespace = model_identity(Path(matrix.model), dtype=_DTYPES[matrix.name]).namespace
    known = systems_of(matrix, Parts(matrix, options.packages.resolve(), namespace))
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / _VERSIONS).write_text(_versions(peer))
    return Rounds(options, display, matrix, known, WORKLOADS).run(LOADS)


def _versions(peer: Path) -> str:
    """Of the packages that vLLM runs on."""
    installed = (peer / "venv" / "lib").glob("python*/site-packages/*.dist-info")
    names = (path.stem for path in installed)
    return ", ".join(sorted(n for n in names if n.partition("-")[0] in ("vllm", "torch", "transformers")))


_START_SECONDS = 600.0
_DTYPES = {"tiny": "float32", "small": "bfloat16"}
_STORE = "unix://${SCRATCH}/store.sock"
#: Without the second one the folder that this runs in would come before the tree.
_OF_THIS_TREE = {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}


class Parts:
    """Commands of the processes that systems are made of. `packages` is put on vLLM's PYTHONPATH."""

    def __init__(self, matrix: Matrix, packages: Path, namespace: str) -> None:
        self._vllm = matrix.named("vllm")
        self._dtype = ("--dtype", _DTYPES[matrix.name])
        self._packages = packages
        self._namespace = namespace

    def consumer(self, port: str, cores: str) -> tuple[str, ...]:
        """A server of vLLM on `cores` with our connector and what our PD worker needs."""
        words = ["--enable-mm-embeds", "--enable-scale-out", "--enable-prompt-tokens-details"]
        extra = {"store": _STORE, "namespace": self._namespace, "wait_seconds": 2, "trusted_front_door": True}
        transfer = {
            "ec_connector": "TriptychECConnector",
            "ec_connector_module_path": "triptych.integrations.vllm",
            "ec_role": "ec_consumer",
            "ec_connector_extra_config": extra,
        }
        words += ["--ec-transfer-config", json.dumps(transfer)]
        return vllm_server(self._vllm, port, cores, words, PYTHONPATH=f"{ROOT}:{self._packages}")

    def store(self) -> tuple[str, ...]:
        words = (str(find_server_binary()), "--port", "0", "--unixsocket", "${SCRATCH}/store.sock")
        memory = ("--maxmemory", "1gb", "--maxmemory-policy", "volatile-lru")
        return (*words, "--dir", "${SCRATCH}", "--save", "", *memory)

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
    result = {name: _with_memory(matrix.named(name)) for name in PEER_SYSTEMS}
    ours = [parts.store(), parts.proxy(), parts.modest_encoder()]
    single = [*ours, parts.consumer("FIRST", "0-1"), parts.pd("FIRST")]
    pinned = [parts.store(), parts.proxy(), parts.encoder("--cpus", "0")]
    pinned += [parts.consumer("FIRST", "1"), parts.pd("FIRST")]
    both = [parts.consumer(port, str(core)) for core, port in enumerate(REPLICA_PORTS)]
    fronts = [parts.pd(port) for port in REPLICA_PORTS]
    result["triptych"] = _ours("triptych", single, ("FIRST",))
    result["triptych-pinned"] = _ours("triptych-pinned", pinned, ("FIRST",))
    result["replicas-triptych"] = _ours("replicas-triptych", [*ours, *both, *fronts], ("FIRST", "SECOND"))
    result["replicas"] = vllm_replicas(matrix.named("vllm"))
    return result


def _with_memory(system: System) -> System:
    """A system of the baselines with as much memory for its KV caches as all others here."""
    memory = "VLLM_CPU_KVCACHE_SPACE"
    commands = tuple(
        tuple(f"{memory}=1" if word.startswith(f"{memory}=") else word for word in command)
        for command in system.commands
    )
    environment = system.env | ({memory: "1"} if memory in system.env else {})
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

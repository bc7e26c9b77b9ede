"""The systems: vLLM as the baselines start it, and Triptych from this tree and from an older one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from msgspec import structs

from benchmarks.baselines.matrix import Matrix, System, read_matrix
from triptych.base.errors import ConfigError

MODELS = ("tiny", "small")
PEER_SYSTEMS = ("vllm", "vllm-epd")
ROOT = Path(__file__).parents[2]
_BASELINES = ROOT / "benchmarks" / "baselines"
#: Many times what a start takes on a quiet machine: what is started is not what is measured.
_START_SECONDS = 1800.0
#: As much as vLLM is given.
_SAME_MEMORY = ("--kv-memory", "2GiB")
_DTYPES = {"tiny": (), "small": ("--dtype", "bfloat16")}
_COLOCATED = {
    "tiny": ("--topology", "colocated", "--replicas", "2", "--threads", "1"),
    "small": ("--topology", "colocated"),
}


def peer_environment(peer: Path) -> dict[str, str]:
    """What the baselines' TOML files need to know of the peer kit's folder."""
    preload = [
        peer / "deb/x/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4",
        peer / "venv/lib/libiomp5.so",
    ]
    return dict(os.environ) | {
        "PEER": str(peer),
        "PEER_PRELOAD": ":".join(str(path) for path in preload if path.exists()),
        "EPD_PROXY": str(peer / "epd_proxy.py"),
    }


def matrix_of(model: str, peer: Path) -> Matrix:
    """The baselines' matrix of the model, whose vLLM systems are used here; ConfigError without a kit."""
    if not (peer / "models" / model / "config.json").exists():
        raise ConfigError(f"{peer} has no models/{model}: give the folder of the peer kit")
    return read_matrix(_BASELINES / f"{model}.toml", peer_environment(peer))


def systems_of(matrix: Matrix, before: Path | None) -> dict[str, System]:
    """All systems by name; `before` only with a checkout of it."""
    found = {name: structs.replace(matrix.named(name), timeout=_START_SECONDS) for name in PEER_SYSTEMS}
    found["triptych"] = triptych(matrix.name, "triptych", ROOT)
    found["colocated"] = triptych(matrix.name, "colocated", ROOT, _COLOCATED[matrix.name])
    if before is not None:
        if not (before / "triptych").is_dir():
            raise ConfigError(f"--before {before} is no checkout of Triptych")
        found["before"] = triptych(matrix.name, "before", before.resolve())
    return found


def triptych(model: str, name: str, tree: Path, words: tuple[str, ...] = ()) -> System:
    """`triptych serve` of the code in `tree`, with its defaults besides dtype, KV memory and `words`."""
    command = [sys.executable, "-m", "triptych.apps.cli", "serve", "${MODEL}", "--port", "${PORT}"]
    command += ["--grpc-port", "${GRPC_PORT}", "--run-dir", "${SCRATCH}/run", "--log-level", "warning"]
    return System(
        name=name,
        commands=((*command, *_SAME_MEMORY, *_DTYPES[model], *words),),
        url="http://127.0.0.1:${PORT}",
        ports=("PORT", "GRPC_PORT"),
        ready=("/ready",),
        # Without the second one the folder that this runs in would come before the first.
        env={"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"},
        timeout=_START_SECONDS,
    )


def commit_of(system: System) -> str:
    """The commit of the tree that the system runs from; empty for vLLM."""
    tree = system.env.get("PYTHONPATH", "")
    if not tree:
        return ""
    command = ["git", "-C", tree, "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout.strip()

"""Two vLLM behind PD workers of ours, alike or prefill and decode apart, for the length of a run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.kills.load import Load, bodies
from benchmarks.kills.processes import Processes
from benchmarks.kills.systems import DTYPE, Place, System, common_services, fed_vllm
from triptych.apps.launch.cluster_state import registered_workers
from triptych.base.errors import ConfigError
from triptych.pd_worker.vllm.kv_transfer import transfer_config

ROLES = ("prefill", "decode")
#: As on a GPU: of a CPU's blocks of 128 tokens short prompts would fill none.
_BLOCKS = ("--block-size", "32")
#: A process that waits as vLLM's do starves on Linux 6.18, and most at a prefill worker, which waits often.
_NO_YIELD = Path(__file__).parent / "no_yield"
_START_SECONDS, _PROBE_SECONDS = 400.0, 1.0
_READ, _OTHERS = "vllm:prompt_tokens_by_source_total", "external_kv_transfer"
#: Requests before the run: the first ones are slow.
_FIRST = 8


def pair(place: Place, threshold: int | None) -> System:
    """A core for each; KV by NIXL for prompts from `threshold` tokens on. None: both do all, without it."""
    apart = threshold is not None
    services, store, url = common_services(place, *(("--prefill-threshold", str(threshold)) if apart else ()))
    for core, role in enumerate(ROLES):
        port, side = place.ports[2 + core], place.ports[4 + core]
        words, roles = list(_BLOCKS), []
        if apart:
            words += [
                "--kv-transfer-config",
                json.dumps({**transfer_config(role), "kv_buffer_device": "cpu"}),
            ]
            roles = ["--role", role, "--kv-connector", "nixl"]
        engine = ("--engine", "vllm", "--engine-url", f"http://127.0.0.1:{port}")
        env = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side)}
        services += [
            fed_vllm(place, f"vllm-{role}", port, core, store, *words, paths=(_NO_YIELD,), **env),
            place.ours("pd", place.model, *DTYPE, *engine, *roles, "--store", store, name=f"worker-{role}"),
        ]
    return System(services, url, "", {})


@contextlib.asynccontextmanager
async def serving(peer: Path, threshold: int | None) -> AsyncIterator[tuple[str, str]]:
    """Where the pair of this kit answers, and the second vLLM's metrics; ConfigError where it does not."""
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as folder:
        place = Place(peer, Path(folder))
        system = pair(place, threshold)
        processes = Processes(system.services, Path(folder), restarts=False)
        try:
            await processes.start()
            await _ready(system.url, f"redis://127.0.0.1:{place.ports[0]}/0", 1 + len(ROLES), Path(folder))
            yield system.url, f"http://127.0.0.1:{place.ports[3]}/metrics"
        finally:
            await processes.close()


def tokens_read(metrics: str) -> float:
    """Prompt tokens that a vLLM has got from another one, by its own counter."""
    samples = (one for family in text_string_to_metric_families(metrics) for one in family.samples)
    return sum(one.value for one in samples if one.name == _READ and one.labels["source"] == _OTHERS)


async def _ready(url: str, store: str, workers: int, logs: Path) -> None:
    """Returns once all workers are registered and the first requests are answered."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        await asyncio.sleep(_PROBE_SECONDS)
        if len(await registered_workers(store)) == workers and all(
            await Load(url).at_once(bodies("", 0, _FIRST))
        ):
            return
    ends = [f"{log.name}: {log.read_text(errors='replace')[-800:]}" for log in sorted(logs.glob("*.log"))]
    raise ConfigError(f"not ready after {_START_SECONDS:g} s:\n" + "\n".join(ends))

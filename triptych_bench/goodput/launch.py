"""A cluster of a given shape for the length of a run: `triptych serve`, started, timed, ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from triptych.apps.launch.cluster_state import registered_workers, scrape_targets
from triptych.base.config import WorkerCounts
from triptych.base.errors import ConfigError
from triptych.base.parent import supervised
from triptych.base.types import WorkerInfo
from triptych_bench.goodput.load.client import LoadClient, make_session
from triptych_bench.goodput.load.job import LoadJob, Target
from triptych_bench.goodput.load.payload import Bodies, words_per_token
from triptych_bench.goodput.load.workload import PlannedRequest

_SHAPE = re.compile(r"(?:(\d+)E(\d+)PD|(\d*)colocated)", re.IGNORECASE)
_END_SECONDS = 90.0


def parse_shape(text: str) -> WorkerCounts:
    """ "1E3PD", "colocated", "2colocated"; ConfigError for anything else."""
    match = _SHAPE.fullmatch(text.strip())
    counts = [int(number or 1) for number in match.groups("1")] if match else [0]
    if match is None or not all(counts):
        raise ConfigError(
            f"--launch {text!r} is no shape: write encoders and PD workers like 1E1PD or 2E2PD, or replicas "
            "like colocated or 2colocated"
        )
    if match[1]:
        return WorkerCounts(encoders=counts[0], pd_workers=counts[1])
    return WorkerCounts(replicas=counts[2])


def shape_words(shape: WorkerCounts) -> list[str]:
    """The flags of `triptych serve` for this shape."""
    if shape.replicas:
        return ["--topology", "colocated", "--replicas", str(shape.replicas)]
    return ["--encoders", str(shape.encoders), "--pd-workers", str(shape.pd_workers)]


@dataclass(frozen=True, slots=True)
class Launched:
    """A cluster that answers. `startup`: seconds from exec to ready, resident MB of all its processes.

    `pid` is its supervisor's, `processes` those of its parts by name, `log` what they write.
    """

    url: str
    metrics_urls: tuple[str, ...]
    startup: dict[str, float]
    pid: int
    log: Path
    processes: Mapping[str, int]


@contextlib.contextmanager
def launched(
    shape: WorkerCounts, model: str, words: Sequence[str], patience: float = 600.0
) -> Iterator[Launched]:
    """`model` may be empty for the demo model; `words` are further flags of `triptych serve`. The
    cluster ends at the latest with the thread that started it.
    """
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as folder:
        run_dir, log_path = Path(folder) / "run", Path(folder) / "log"
        port, grpc_port = free_ports(2)
        command = [sys.executable, "-m", "triptych.apps.cli", "serve", *([model] if model else [])]
        command += [*shape_words(shape), "--run-dir", str(run_dir)]
        command += ["--port", str(port), "--grpc-port", str(grpc_port), *words]
        begun = time.monotonic()
        with log_path.open("wb") as log:
            # A run that is killed leaves no cluster behind.
            command, environment = supervised(command)
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(process, url, shape, run_dir, log_path, begun + patience)
            seconds = time.monotonic() - begun
            startup = {"seconds_to_ready": seconds, "resident_mb": _resident_mb(run_dir)}
            groups = scrape_targets(_workers(run_dir), f"127.0.0.1:{port}")
            pages = tuple(f"http://{page}/metrics" for group in groups for page in group["targets"])
            yield Launched(url, pages, startup, process.pid, log_path, processes_of(run_dir))
        finally:
            _end(process)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in taken]


def _wait_ready(
    process: subprocess.Popen[bytes], url: str, shape: WorkerCounts, run_dir: Path, log: Path, deadline: float
) -> None:
    while process.poll() is None and time.monotonic() < deadline:
        if answers(f"{url}/ready") and len(_workers(run_dir)) >= shape.encoding + shape.decoding:
            return
        time.sleep(0.1)
    output = log.read_text(errors="replace").strip()[-1500:]
    state = "is not ready" if process.poll() is None else f"ended with {process.returncode}"
    raise ConfigError(f"--launch: the cluster {state}:\n{output}")


def answers(url: str) -> bool:
    """Whether a GET is a 200."""
    try:
        with urllib.request.urlopen(url, timeout=2.0) as reply:
            return bool(reply.status == 200)
    except (OSError, ValueError):
        return False


def _state(run_dir: Path) -> dict[str, object]:
    path = run_dir / "cluster.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def processes_of(run_dir: Path) -> dict[str, int]:
    """The process ids of a cluster's parts by name, as they are now."""
    result = _state(run_dir).get("processes")
    return dict(result) if isinstance(result, dict) else {}


def _workers(run_dir: Path) -> list[WorkerInfo]:
    state = _state(run_dir)
    return asyncio.run(registered_workers(str(state["store"]))) if state else []


def _resident_mb(run_dir: Path) -> float:
    """Of all processes of the cluster, pages that forks share counted in each."""
    total = 0
    for pid in processes_of(run_dir).values():
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    return round(total / 1024, 1)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


_SHORT, _LONG = 8, 136
_PATIENCE = 120.0


def find_model(target: Target) -> Target:
    """The target with the first model it serves, unless it has one. ConfigError when it does not answer."""
    return target if target.model else replace(target, model=asyncio.run(_first_model(target)))


async def _first_model(target: Target) -> str:
    url = f"{target.url.rstrip('/')}/v1/models"
    try:
        async with make_session(target) as session, asyncio.timeout(_PATIENCE), session.get(url) as response:
            if response.status != 200:
                raise ConfigError(f"--url {target.url}: /v1/models answers {response.status}")
            listed = await response.json(content_type=None)
            return str(listed["data"][0]["id"])
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ConfigError(f"--url {target.url} does not answer: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"--url {target.url}: no model in /v1/models; name it with --model") from error


def calibrate(target: Target) -> float:
    """Words per token by the server's own usage of two short requests; 1 when it reports no usage."""
    planned = [PlannedRequest(seed, words, 1) for seed, words in ((1, _SHORT), (2, _LONG))]
    counts = asyncio.run(_prompt_tokens(target, planned))
    return words_per_token((_SHORT, counts[0]), (_LONG, counts[1]))


async def _prompt_tokens(target: Target, planned: list[PlannedRequest]) -> list[int]:
    counts = []
    job = LoadJob(target, tuple((0.0, request) for request in planned))
    async with make_session(target) as session:
        client = LoadClient(session, target, time.perf_counter(), _PATIENCE)
        for index, request in enumerate(planned):
            with closing(Bodies(job)) as bodies:
                body = bodies.body(index)
            record = await client.send(index, 0.0, request, body, warm_up=True)
            if not record.ok:
                raise ConfigError(f"--url {target.url} does not do what is measured: {record.error}")
            counts.append(record.prompt_tokens)
    return counts

"""Many registered workers around one store, and one proxy before them: who spends how much CPU time.

Real: the store, the proxy's process with all that it does when idle, every worker's heartbeat on a connection
of its own, a gRPC connection from the proxy to every worker's address, health checks, keepalive pings and
proofs of the internal token. Simulated: the workers of a group are one process, which answers at all of their
loopback addresses and has no engine; they are encoders, since PD workers would also stream events.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from triptych.ec_connector.registry.heartbeat import INTERVAL, Heartbeat
from triptych.ec_connector.registry.registry import Registry
from triptych.ec_connector.store.embedding_store import EmbeddingStore
from triptych.launch.embedded_store import EmbeddedStore
from triptych.rpc.channels import make_server
from triptych.rpc.server_auth import WorkerAuth
from triptych.types import WorkerInfo

TOKEN = "internal-token-of-the-benchmark"
#: Worker processes, and seconds until all connections stand and the start is over.
GROUPS, START_SECONDS = 2, 300.0
_SETTLE_SECONDS = 20.0
_READY = re.compile(r"ready: proxy (http://127\.0\.0\.1:\d+)")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class CrowdLoad:
    """CPU seconds per second of the store, of the proxy and of all workers, at this number of workers."""

    workers: int
    seconds: float
    store: float
    proxy: float
    beats: float


def measure(workers: int, seconds: float) -> CrowdLoad:
    """Starts everything, waits until the proxy knows all workers, and reads CPU times over `seconds`."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="crowd-")))
        store = EmbeddedStore(folder, 1 << 28)
        store.start()
        stack.callback(store.stop)
        share = workers // GROUPS
        groups = [
            stack.enter_context(
                _process(folder / f"group-{index}.log", _group_words(store.url, index, share))
            )
            for index in range(GROUPS)
        ]
        proxy, url = stack.enter_context(_proxy(folder / "proxy.log", store.url))
        _wait_for(lambda: _known(url) == share * GROUPS, f"the proxy knows {share * GROUPS} workers")
        time.sleep(_SETTLE_SECONDS)
        pids = {"store": [store.pid], "proxy": [proxy.pid], "beats": [group.pid for group in groups]}
        before, start = _cpu(pids), time.monotonic()
        time.sleep(seconds)
        after, spent = _cpu(pids), time.monotonic() - start
        # On a busy machine health checks fail now and then: what that costs is in the figures.
        _wait_for(lambda: _known(url) == share * GROUPS, "all workers after the measurement")
    used = {name: (after[name] - before[name]) / spent for name in pids}
    return CrowdLoad(share * GROUPS, spent, used["store"], used["proxy"], used["beats"])


def _group_words(url: str, index: int, count: int) -> list[str]:
    return ["-m", __name__, "--store", url, "--first", str(index * count), "--count", str(count)]


@contextmanager
def _process(log: Path, words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *words],
            stdout=file,
            stderr=file,
            env=os.environ | {"TRIPTYCH_INTERNAL_TOKEN": TOKEN},
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _proxy(log: Path, url: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    words = ["-m", "triptych.cli", "proxy", "--store", url, "--port", "0", "--grpc-port", "0"]
    words += ["--max-encoders", "1000"]  # so that the autoscaler runs
    with _process(log, words) as process:
        _wait_for(lambda: _READY.search(log.read_text()) is not None, "the proxy's start")
        found = _READY.search(log.read_text())
        assert found is not None
        yield process, found[1]


def _known(url: str) -> int:
    """Encoders that the proxy has checked and may use."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
            page = reply.read().decode()
    except OSError:
        return 0  # the machine is busy with the start
    found = re.search(r'^triptych_workers\{pool="encoder"\} (\S+)$', page, re.MULTILINE)
    return int(float(found[1])) if found else 0


def _wait_for(holds: object, what: str) -> None:
    assert callable(holds)
    deadline = time.monotonic() + START_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"waited {START_SECONDS:.0f} s for: {what}"
        time.sleep(0.5)


def _cpu(pids: Mapping[str, list[int]]) -> dict[str, float]:
    """User and system seconds of the processes, by name."""
    return {name: sum(_cpu_of(pid) for pid in each) for name, each in pids.items()}


def _cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def address_of(index: int, port: int) -> str:
    """An address of its own for each worker: all of 127.0.0.0/8 is this machine."""
    return f"127.1.{index // 250}.{1 + index % 250}:{port}"


def worker(index: int, port: int) -> WorkerInfo:
    """As an encoder of Qwen3-VL registers itself."""
    return WorkerInfo(
        address=address_of(index, port),
        pool="encoder",
        incarnation=f"{index:032x}",
        model_key="a" * 64,
        model="Qwen3-VL-4B-Instruct",
        namespaces=("b" * 64,),
        capacity={"plan_credit": 16, "tower_credit": 8, "metrics_port": 9000, "row_width": 8192},
    )


async def serve_group(url: str, first: int, count: int) -> None:
    """`count` workers in one process, until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    auth = WorkerAuth(TOKEN)
    server = make_server(auth)
    state = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    await state.set("", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("0.0.0.0:0")
    infos = [auth.add_worker(worker(index, port)) for index in range(first, first + count)]
    await server.start()
    stores, beats = [], []
    for info in infos:
        store = await EmbeddingStore.connect(url)
        stores.append(store)
        beats.append(Heartbeat(Registry(store), info))
        beats[-1].start()
        # As workers that were started one after another: their beats are spread over the interval.
        await asyncio.sleep(INTERVAL / count)
    await stop.wait()
    await asyncio.gather(*(beat.stop(withdraw=False) for beat in beats))
    await server.stop(0.1)
    await asyncio.gather(*(store.close() for store in stores))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    given = parser.parse_args()
    asyncio.run(serve_group(given.store, given.first, given.count))

"""A real cluster of real processes for tests: `triptych serve`, and services alone beside it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from prometheus_client.parser import text_string_to_metric_families

from triptych.base.types import WorkerInfo
from triptych.protos import proxy_pb2, proxy_pb2_grpc
from triptych.registry.registry import Registry
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore

#: Longest wait for anything in a test, in seconds; the machine may be busy.
PATIENCE = 180.0


def free_port() -> int:
    """A loopback port that was free a moment ago.

    It is above Ray's, and below those that the system gives to connections and to port 0: between this
    moment and the use of the port, only another test that draws the same number could take it.
    """
    for _ in range(100):
        port = random.SystemRandom().randrange(30_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port of 100 between 30000 and 32767 is free")


def wait_for(what: str, holds: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """The first true value of `holds`; AssertionError naming `what` when its time is over."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        value = holds()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {patience:.0f} s for: {what}")


def data_url(image: Any) -> str:
    """A picture (PIL) as a data: URL in PNG."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


@dataclass
class Cluster:
    """A running cluster. `log` is what its processes wrote."""

    url: str
    grpc_address: str
    run_dir: Path
    log: Path
    process: subprocess.Popen[bytes]
    extra: list[subprocess.Popen[bytes]] = field(default_factory=list)
    #: The internal token, in the variable that gives it to a service.
    token: dict[str, str] = field(default_factory=dict)
    #: Where the proxy's metrics are, when they have a port of their own.
    metrics_url: str = ""
    _metrics_urls: dict[str, list[str]] = field(default_factory=dict)

    @property
    def store_url(self) -> str:
        return str(self.state()["store"])

    def chat_grpc(self, *parts: dict[str, Any], **sampling: Any) -> list[proxy_pb2.ChatEvent]:
        """The events of a greedy answer to one message of these parts."""
        request = proxy_pb2.ChatRequest(
            messages=[{"role": "user", "parts": parts}],
            sampling={"temperature": 0, **sampling},
            return_token_ids=True,
        )
        with grpc.insecure_channel(self.grpc_address) as channel:
            return list(proxy_pb2_grpc.ProxyServiceStub(channel).Chat(request, timeout=PATIENCE))

    def state(self) -> dict[str, Any]:
        """cluster.json as it is now."""
        state: dict[str, Any] = json.loads((self.run_dir / "cluster.json").read_text())
        return state

    def pid(self, name: str) -> int:
        """Process id of `encoder-0`, `pd-1`, `proxy` or `store`, once it has one."""
        return int(wait_for(f"a process id of {name}", lambda: self.state()["processes"].get(name)))

    def names(self, pool: str) -> list[str]:
        """Names of the pool's processes that live now."""
        return list(self.pids(pool))

    def pids(self, pool: str) -> dict[str, int]:
        """Process ids of the pool's processes that live now, by name; never waits for one."""
        processes = self.state()["processes"].items()
        return {name: int(pid) for name, pid in processes if pid and name.startswith(f"{pool}-")}

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid(name), number)

    def workers(self) -> list[WorkerInfo]:
        """Live workers, as the registry knows them."""

        async def ask() -> list[WorkerInfo]:
            store = await EmbeddingStore.connect(self.store_url)
            try:
                return await Registry(store).workers()
            finally:
                await store.close()

        # In a thread: the caller may be a test with an event loop of its own.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, ask()).result(PATIENCE)

    def metrics(self, pool: str) -> list[dict[str, float]]:
        """Samples of every worker of the pool ("encoder", "pd"), or of the proxy, labels left out."""
        if pool == "proxy":
            return [scrape(self.metrics_url or f"{self.url}/metrics")]
        pages: list[dict[str, float]] = wait_for(f"metrics of the {pool} workers", lambda: self._pages(pool))
        return pages

    def _pages(self, pool: str) -> list[dict[str, float]] | None:
        """None while a worker that has ended is still registered, none is, or the store is coming back."""
        try:
            if pool not in self._metrics_urls:
                ports = [w.capacity["metrics_port"] for w in self.workers() if w.pool == pool]
                self._metrics_urls[pool] = [f"http://127.0.0.1:{port}/metrics" for port in ports]
            pages = [scrape(url) for url in self._metrics_urls[pool]]
        except (OSError, StoreUnavailable):
            pages = []
        if not pages:
            self._metrics_urls.pop(pool, None)
        return pages or None

    def total(self, pool: str, name: str) -> float:
        """One sample's sum over a pool."""
        return sum(samples.get(name, 0.0) for samples in self.metrics(pool))

    def get(self, path: str, key: str = "") -> Any:
        """The JSON of a page. `key`: the API key to send."""
        request = urllib.request.Request(self.url + path, headers=_with_key(key))
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            return json.loads(reply.read())

    def models(self, key: str = "") -> dict[str, dict[str, Any]]:
        """What the proxy says of its models, by their names."""
        return {model["id"]: model for model in self.get("/v1/models", key)["data"]}

    def post(
        self,
        body: dict[str, Any],
        timeout: float = PATIENCE,
        key: str = "",
        path: str = "/v1/chat/completions",
        label: str = "",
    ) -> dict[str, Any]:
        """The reply to a POST; `status` is added to it. `key`: the API key to send, `label`: its id."""
        headers = {"Content-Type": "application/json", **_with_key(key)}
        if label:
            headers["X-Request-ID"] = label
        request = urllib.request.Request(self.url + path, data=json.dumps(body).encode(), headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                return {**json.loads(reply.read()), "status": reply.status}
        except urllib.error.HTTPError as error:
            with error:
                return {**json.loads(error.read()), "status": error.code}

    def add_worker(self, *words: str) -> subprocess.Popen[bytes]:
        """A service alone beside the cluster, with its token: `add_worker("encoder", "/folder")`."""
        command = [sys.executable, "-m", "triptych.apps.cli", *words, "--store", self.store_url]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=os.environ | self.token
            )
        self.extra.append(process)
        self._metrics_urls.clear()
        return process

    def stop(self) -> int:
        """SIGTERM to all; the exit code of `triptych serve`."""
        for process in (*self.extra, self.process):
            if process.poll() is None:
                process.terminate()
        for process in (*self.extra, self.process):
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return int(self.process.returncode)


def _with_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def scrape(url: str) -> dict[str, float]:
    """Samples of a /metrics page by name, labels summed up."""
    with urllib.request.urlopen(url, timeout=10) as reply:
        text = reply.read().decode()
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
    return samples


def start_cluster(
    model: Path | None, run_dir: Path, *words: str, environment: dict[str, str] | None = None
) -> Cluster:
    """Starts `triptych serve MODEL …` and waits until it says that it answers; None: without MODEL."""
    run_dir.mkdir(parents=True, exist_ok=True)
    port, grpc_port = free_port(), free_port()
    log = run_dir / "cluster.log"
    command = [
        *(sys.executable, "-m", "triptych.apps.cli", "serve", "--run-dir", str(run_dir)),
        *([str(model)] if model else []),
        *(
            "--port",
            str(port),
            "--grpc-port",
            str(grpc_port),
            "--kv-memory",
            "64MiB",
            "--store-memory",
            "128MiB",
        ),
        *("--encoder-cache-memory", "32MiB", "--prepared-memory", "64MiB", "--encoders", "1", *words),
    ]
    variable = "TRIPTYCH_INTERNAL_TOKEN"
    token = {} if "--internal-token" in words else {variable: secrets.token_hex(16)}
    environment = token | (environment or {})
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=os.environ | environment
        )
    token = {name: value for name, value in environment.items() if name == variable}
    scheme = "https" if "--http-cert-file" in words else "http"
    urls = (f"{scheme}://127.0.0.1:{port}", f"127.0.0.1:{grpc_port}")
    cluster = Cluster(*urls, run_dir, log, process, token=token)

    def ready() -> bool:
        if process.poll() is not None:
            raise AssertionError(f"the cluster ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        return b"Triptych answers" in log.read_bytes()

    try:
        wait_for("the cluster to answer", ready)
    except BaseException:
        cluster.stop()
        raise AssertionError(log.read_text()[-4000:]) from None
    return cluster


@contextlib.contextmanager
def running_cluster(
    model: Path | None, run_dir: Path, *words: str, environment: dict[str, str] | None = None
) -> Iterator[Cluster]:
    """A cluster for the length of a `with`."""
    cluster = start_cluster(model, run_dir, *words, environment=environment)
    try:
        yield cluster
    finally:
        cluster.stop()

"""Our proxies, encoder workers and PD workers as processes in front of vLLM servers, on one store."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from support.data.oracle import OracleResult, assert_exact
from support.fakes.fake_workers import TOKEN
from support.processes.cluster import PATIENCE, scrape, wait_for
from support.processes.proxy_process import started_proxy, started_service
from support.stores.server import StoreServer
from support.vllm_engine.server import VllmServer
from triptych.base.parent import supervised
from triptych.base.types import WorkerInfo
from triptych.registry.registry import Registry
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore

DTYPE = ("--dtype", "float32")
#: Requests wait for a store that is away, however slow this machine is to start it again.
_PROXY_WORDS = ("proxy", "--port", "0", "--grpc-port", "0", "--store-wait", "120")
_PROXY = re.compile(r"ready: proxy (http://127\.0\.0\.1:\d+)")


_ENCODER = ("--threads", "1")
_NATIVE = ("--threads", "1", "--kv-memory", "64MiB", "--encoder-cache-memory", "32MiB")


@asynccontextmanager
async def cluster(
    checkpoint: Path,
    store: StoreServer,
    vllm: VllmServer | None,
    folder: Path,
    *,
    native: bool = False,
    encoder_words: Sequence[str] = (),
    vllm_words: Sequence[str] = (),
) -> AsyncIterator[str]:
    """The address of a proxy, once its encoder worker and its PD workers are registered."""
    model = (str(checkpoint), *DTYPE)
    services: dict[str, tuple[str, ...]] = {"encoder": ("encoder", *model, *_ENCODER, *encoder_words)}
    if vllm is not None:
        services["vllm-pd"] = ("pd", *model, "--engine", "vllm", "--engine-url", vllm.url, *vllm_words)
    if native:
        services["native-pd"] = ("pd", *model, *_NATIVE)
    async with contextlib.AsyncExitStack() as stack:
        for name, words in services.items():
            await stack.enter_async_context(started_service(store.url, folder / f"{name}.log", *words))
        _, port, _ = await stack.enter_async_context(started_proxy(store.url, folder / "proxy.log"))
        client = await EmbeddingStore.connect(store.url)
        stack.push_async_callback(client.close)
        registered: list[object] = []
        while len(registered) < len(services):
            await asyncio.sleep(0.2)
            registered = list(await Registry(client).workers())
        yield f"http://127.0.0.1:{port}"


class FrontDoor:
    """Services named `encoder-0`, `pd-0` (in front of the first server), `proxy-0` and so on.

    A process ends with the thread that has started it: start them in the test's own.
    """

    def __init__(
        self,
        checkpoint: Path,
        store: StoreServer,
        servers: Sequence[VllmServer],
        folder: Path,
        *,
        encoders: int = 1,
        proxies: int = 1,
        pd_words: Sequence[Sequence[str]] = (),
        proxy_words: Sequence[str] = (),
        dtype: str = "float32",
    ) -> None:
        """`pd_words` are further words of each PD worker."""
        self.store = store
        self.servers = list(servers)
        self._folder = folder
        model = (str(checkpoint), "--dtype", dtype)
        self._words = {
            **{f"encoder-{n}": ("encoder", *model, "--threads", "1") for n in range(encoders)},
            **{
                f"pd-{n}": ("pd", *model, "--engine", "vllm", "--engine-url", server.url, *more)
                for n, (server, more) in enumerate(zip(servers, pd_words or [()] * len(servers), strict=True))
            },
            **{f"proxy-{n}": (*_PROXY_WORDS, *proxy_words) for n in range(proxies)},
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Starts all of them and waits until the proxies are ready and know the workers."""
        for name in self._words:
            self._launch(name)
        for name in self._words:
            self._wait_ready(name, 1)
        pools = [name for name in self._words if not name.startswith("proxy")]
        wait_for("all workers to register", lambda: len(self.workers()) >= len(pools))
        for url in self.urls:
            wait_for("a proxy that answers", partial(_answers, f"{url}/ready"))

    def _launch(self, name: str) -> None:
        words = [sys.executable, "-m", "triptych.apps.cli", *self._words[name], "--store", self.store.url]
        command, environment = supervised(words)
        environment |= {"TRIPTYCH_INTERNAL_TOKEN": TOKEN}
        with self.log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _wait_ready(self, name: str, times: int) -> None:
        def ready() -> bool:
            text = self.log(name).read_text(errors="replace")
            assert self._processes[name].poll() is None, text[-4000:]
            return text.count("ready: ") >= times

        wait_for(f"{name} to be ready", ready)

    def log(self, name: str) -> Path:
        """What the service has written, all its processes one after the other."""
        return self._folder / f"{name}.log"

    @property
    def urls(self) -> list[str]:
        """The proxies' addresses."""
        logs = [self.log(name).read_text() for name in self._words if name.startswith("proxy")]
        return [found[1] for text in logs if (found := _PROXY.search(text))]

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to a service."""
        os.kill(self._processes[name].pid, number)

    def replace(self, name: str) -> None:
        """Starts the service anew after its death, and waits until it is ready."""
        self._processes[name].wait(PATIENCE)
        before = self.log(name).read_text(errors="replace").count("ready: ")
        self._launch(name)
        self._wait_ready(name, before + 1)

    def kill(self, name: str) -> None:
        """Ends the service at once."""
        self.signal(name, signal.SIGKILL)
        self._processes[name].wait(PATIENCE)

    def workers(self) -> list[WorkerInfo]:
        """Live workers, as the registry knows them; none while the store does not answer."""

        async def ask() -> list[WorkerInfo]:
            store = await EmbeddingStore.connect(self.store.url)
            try:
                return list(await Registry(store).workers())
            finally:
                await store.close()

        # In a thread: the caller may be a test with an event loop of its own.
        with ThreadPoolExecutor(1) as thread:
            try:
                return thread.submit(asyncio.run, ask()).result(PATIENCE)
            except StoreUnavailable:
                return []

    def total(self, pool: str, name: str) -> float:
        """A sample's sum over the pool ("proxy", "encoder", "pd"), of those that answer."""
        if pool == "proxy":
            pages = [f"{url}/metrics" for url in self.urls]
        else:
            ports = [w.capacity["metrics_port"] for w in self.workers() if w.pool == pool]
            pages = [f"http://127.0.0.1:{port}/metrics" for port in ports]
        return sum(_sample(page, name) for page in pages)

    def assert_alive(self) -> None:
        """All processes and all engines live."""
        ended = [name for name, process in self._processes.items() if process.poll() is not None]
        assert not ended
        assert [server.is_alive() for server in self.servers] == [True] * len(self.servers)

    def stop(self) -> None:
        """Ends all services."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self._processes.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _sample(page: str, name: str) -> float:
    try:
        return scrape(page).get(name, 0.0)
    except OSError:
        # A worker that has ended is registered a little longer.
        return 0.0


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def namespace_of(checkpoint: Path, dtype: str = "float32") -> str:
    """The namespace of our encoder workers, as `triptych namespace` prints it."""
    command = [sys.executable, "-m", "triptych.apps.cli", "namespace", str(checkpoint), "--dtype", dtype]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def assert_varied_and_exact(references: Sequence[OracleResult], outputs: Sequence[list[int]]) -> None:
    """This checkpoint repeats itself within answers, so it is between answers that tokens must vary."""
    assert_exact(references, outputs, min_distinct=1)
    assert len({tuple(output) for output in outputs}) > len(outputs) // 2


async def holds(what: str, condition: Callable[[], object]) -> None:
    """Returns once the condition, which may block, is true."""
    await asyncio.to_thread(wait_for, what, condition, 60.0)

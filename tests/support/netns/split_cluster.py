"""A cluster with a host for each process, and clients of its proxies while the network is cut."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from support.data.traffic import WORDS, picture
from support.netns.network import Network
from support.processes.cluster import PATIENCE, data_url, scrape, wait_for
from triptych.apps.launch.embedded_store import find_server_binary
from triptych.base.parent import supervised

PROXIES = ("proxy-0", "proxy-1")
ENCODERS = ("encoder-0", "encoder-1")
PD_WORKERS = ("pd-0", "pd-1")
HOSTS = ("store", *PROXIES, *ENCODERS, *PD_WORKERS)
TOKEN = "a token of this test alone"
TOKENS = 8
_SMALL = ("--threads", "1", "--insecure", "--port", "7000", "--metrics-port", "7001")


class SplitCluster:
    """Two proxies, two PD workers, a store and an encoder, or two when asked for; one host each."""

    def __init__(
        self,
        network: Network,
        model: Path,
        folder: Path,
        *proxy_words: str,
        roles: Mapping[str, str] | None = None,
    ) -> None:
        """`roles`: of PD workers, by their hosts; "both" where none is given."""
        self.network = network
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._model = model
        self._proxy_words = proxy_words
        self._roles = dict(roles or {})

    def url(self, proxy: str) -> str:
        return f"http://{self.network.addresses[proxy]}:8000"

    def __enter__(self) -> SplitCluster:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        options = {"port": "6379", "bind": "0.0.0.0", "protected-mode": "no", "save": "", "appendonly": "no",
                   "dir": str(self._folder), "maxmemory": "64mb",
                   "maxmemory-policy": "volatile-lru"}  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        self._spawn("store", str(find_server_binary()), *words)
        self._encoder(ENCODERS[0])
        memory = ("--kv-memory", "32MiB", "--encoder-cache-memory", "32MiB")
        for name in PD_WORKERS:
            role = ("--role", self._roles.get(name, "both"))
            self._service(name, "pd", str(self._model), *_SMALL, *memory, *role)
        # Started last: a proxy connects to the store for 30 s at most.
        for name in PROXIES:
            self._service(
                name,
                "proxy",
                "--insecure",
                "--no-auth",
                "--port",
                "8000",
                "--grpc-port",
                "8001",
                *self._proxy_words,
            )
        self._wait()

    def start_second_encoder(self) -> None:
        """From now on there are two."""
        if ENCODERS[1] not in self._processes:
            self._encoder(ENCODERS[1])
            self._wait()

    def _wait(self) -> None:
        for name in (set(HOSTS) - {"store"}) & self._processes.keys():
            wait_for(f"{name} to be ready", partial(self._says, name, "ready: "))
        for name in PROXIES:
            wait_for(f"{name} to know all workers", partial(self._knows_all, name))

    def _encoder(self, name: str) -> None:
        self._service(name, "encoder", str(self._model), *_SMALL, "--prepared-memory", "64MiB")

    def _service(self, name: str, service: str, *words: str) -> None:
        address = self.network.addresses
        words = (*words, "--host", address[name], "--store", f"redis://{address['store']}:6379/0")
        self._spawn(name, sys.executable, "-m", "triptych.apps.cli", service, *words)

    def _spawn(self, name: str, *words: str) -> None:
        command, environment = supervised(self.network.command(name, *words))
        with self.log(name).open("wb") as out:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment | {"TRIPTYCH_INTERNAL_TOKEN": TOKEN},
            )

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _says(self, name: str, text: str) -> bool:
        said = self.log(name).read_text()
        if self._processes[name].poll() is not None:
            raise AssertionError(f"{name} has ended:\n{said[-3000:]}")
        return text in said

    def _knows_all(self, proxy: str) -> bool:
        try:
            workers = self._processes.keys() & {*ENCODERS, *PD_WORKERS}
            return self.samples(proxy)["triptych_workers"] == len(workers)
        except (OSError, KeyError):
            return False

    def samples(self, name: str) -> dict[str, float]:
        """The metrics of a process, labels summed up."""
        if name in PROXIES:
            return scrape(f"{self.url(name)}/metrics")
        return scrape(f"http://{self.network.addresses[name]}:7001/metrics")

    def ready(self, proxy: str) -> tuple[int, dict[str, Any]]:
        """The proxy's readiness: status and body."""
        try:
            with urllib.request.urlopen(f"{self.url(proxy)}/ready", timeout=PATIENCE) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(PATIENCE / 3)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()


@dataclass(frozen=True)
class Question:
    """One request: its kind ("text", "repeated" or "fresh"), its text, and the seed of its picture."""

    kind: str
    text: str
    seed: int = 0

    def body(self, **extra: Any) -> dict[str, Any]:
        content: list[dict[str, Any]] = [{"type": "text", "text": self.text}]
        if self.kind != "text":
            content.insert(
                0, {"type": "image_url", "image_url": {"url": data_url(picture(self.seed, 64, 64))}}
            )
        return {
            "model": "",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **extra,
        }


#: Pictures that are asked for again and again, and the texts beside them.
REPEATED = tuple(Question("repeated", f"what is in picture {seed}", seed) for seed in range(4))
TEXTS = tuple(Question("text", " ".join(random.Random(seed).choices(WORDS, k=8))) for seed in range(4))


def fresh(number: int) -> Question:
    """One with a picture that no other number has."""
    return Question("fresh", f"describe {number}", 1_000 + number)


@dataclass(frozen=True)
class Reply:
    """What one request got; `seconds` from its start to its end."""

    question: Question
    proxy: str
    started: float
    seconds: float
    status: int
    token_ids: tuple[int, ...] = ()
    said: str = ""


class Clients:
    """Clients of all proxies, for one event loop."""

    def __init__(self, cluster: SplitCluster) -> None:
        self._cluster = cluster

    async def __aenter__(self) -> Clients:
        # A connection of its own for each request: none is kept that a cut has met.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        self._http = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(PATIENCE))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def ask(self, proxy: str, question: Question, **extra: Any) -> Reply:
        """The reply, whatever it is."""
        # Made in a thread: pictures take time, and are no part of the request's.
        body = await asyncio.to_thread(question.body, **extra)
        started = time.monotonic()
        url = f"{self._cluster.url(proxy)}/v1/chat/completions"
        async with self._http.post(url, json=body) as reply:
            status, said = reply.status, await reply.text()
        seconds = time.monotonic() - started
        if status != 200:
            return Reply(question, proxy, started, seconds, status, said=said[:300])
        ids = tuple(json.loads(said)["choices"][0]["token_ids"])
        return Reply(question, proxy, started, seconds, 200, ids)

    async def ask_all(self, questions: Sequence[Question], proxies: Sequence[str] = PROXIES) -> list[Reply]:
        """All of them at once, at the proxies in turn."""
        return list(
            await asyncio.gather(
                *(self.ask(proxies[i % len(proxies)], question) for i, question in enumerate(questions))
            )
        )


def wrong(got: Sequence[Reply], right: Sequence[Reply]) -> list[str]:
    """The replies that are no answer, or another one than was given to the question without a cut."""
    known = {reply.question: reply.token_ids for reply in right}
    return [
        f"{reply.proxy} {reply.question} {reply.status} {reply.said} {reply.token_ids}"
        for reply in got
        if reply.status != 200 or reply.token_ids != known[reply.question]
    ]

"""What clients see when something fails: Triptych and vLLM on the same cores, the same requests.

    python -m benchmarks.against_peer.failures PEER --results DIR [--rounds 3] [--write]

PEER is the kit that `against_peer` takes. Half of the requests are text, half show a photograph. In the
middle of a run one thing fails; nobody restarts vLLM's processes meanwhile, Triptych's supervisor restarts
its own. An answer is right when its tokens are those that Triptych gives afterwards, with nothing broken and
nothing cached.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import redis
from msgspec import structs
from rich.console import Console

from benchmarks.against_peer.rounds import ROOT, matrix_of, systems_of, triptych
from benchmarks.baselines.matrix import Matrix, System
from benchmarks.baselines.servers import Server, serving
from benchmarks.baselines.tables import spread, table
from benchmarks.result_page import RESULTS, add_write_flag, fill, publish
from triptych.base.errors import ConfigError
from triptych.goodput.load.payload import data_url
from triptych.goodput.load.words import text
from triptych.goodput.load.workload import Picture
from triptych.goodput.report.display import Display

PAGE = RESULTS / "failures.md"
REQUESTS, AT_ONCE, TOKENS = 64, 8, 64
#: Answers before something fails.
BEFORE_FAULT = 16
TEXT_TOKENS = 60
TIMEOUT_SECONDS = 60.0
SIZE = (448, 336)
_CONTENT = "photos"


class Trial(msgspec.Struct, frozen=True):
    """One run: `answers` are the tokens of each request, empty for one that failed with `errors`."""

    system: str
    fault: str
    number: int
    seconds: float
    latencies: list[float]
    answers: list[list[int]]
    errors: list[str]


@dataclass(frozen=True, slots=True)
class Fault:
    """`act` breaks it in a running server. `deadly`: of a system that has to be started again after it."""

    name: str
    act: Callable[[Server], None]
    deadly: bool = True


def _kill(index: int) -> Callable[[Server], None]:
    """The process group of a system's command."""
    return lambda server: os.killpg(server.pids[index], signal.SIGKILL)


def _cluster(server: Server) -> dict[str, object]:
    assert server.scratch is not None
    return dict(json.loads((server.scratch / "run" / "cluster.json").read_text()))


def _kill_worker(name: str) -> Callable[[Server], None]:
    def act(server: Server) -> None:
        processes = _cluster(server)["processes"]
        assert isinstance(processes, dict)
        os.kill(int(processes[name]), signal.SIGKILL)

    return act


def _flush(server: Server) -> None:
    with redis.Redis.from_url(str(_cluster(server)["store"]), socket_timeout=10.0) as store:
        store.flushall()


NOTHING = Fault("nothing", lambda _server: None, deadly=False)
ENCODER, DECODER, CACHE = "encoder killed", "server that decodes killed", "embeddings lost"
FAULTS: dict[str, tuple[Fault, ...]] = {
    "triptych": (
        NOTHING,
        Fault(CACHE, _flush, deadly=False),
        Fault(ENCODER, _kill_worker("encoder-0"), deadly=False),
        Fault(DECODER, _kill_worker("pd-0"), deadly=False),
    ),
    "replicas": (NOTHING, Fault(DECODER, _kill(0))),
    "vllm-epd": (NOTHING, Fault(CACHE, Server.empty_scratch), Fault(ENCODER, _kill(0))),
}
_NAMES = (NOTHING.name, CACHE, ENCODER, DECODER)


def systems(matrix: Matrix) -> dict[str, System]:
    """Two of everything for Triptych and for vLLM alone; vLLM's EPD as the baselines have it."""
    found = {"vllm-epd": systems_of(matrix, None)["vllm-epd"]}
    words = ("--encoders", "2", "--pd-workers", "2", "--threads", "1")
    found["triptych"] = triptych(matrix.name, "triptych", ROOT, words)
    vllm = matrix.named("vllm")
    urls, commands = [], []
    for core, port in enumerate(("FIRST", "SECOND")):
        command = [word.replace("${PORT}", f"${{{port}}}") for word in vllm.commands[0]]
        bound = ("env", "VLLM_CPU_KVCACHE_SPACE=1", f"VLLM_CPU_OMP_THREADS_BIND={core}")
        commands.append((*bound, *command))
        urls.append(f"http://127.0.0.1:${{{port}}}")
    found["replicas"] = structs.replace(
        vllm,
        name="replicas",
        commands=tuple(commands),
        url=",".join(urls),
        ports=("FIRST", "SECOND"),
        ready=tuple(f"{url}/health" for url in urls),
    )
    return found


def bodies(model: str, seed: int, salt: str = "") -> list[bytes]:
    """The requests of a run; those of another seed share nothing with them."""
    found = []
    for index in range(REQUESTS):
        own = seed * REQUESTS + index
        content: list[dict[str, object]] = [{"type": "text", "text": text(TEXT_TOKENS, own)}]
        if index % 2:
            url = data_url(Picture(own, *SIZE, _CONTENT)).decode()
            content.insert(0, {"type": "image_url", "image_url": {"url": url}})
        body: dict[str, object] = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        if salt:
            body["cache_salt"] = salt
        found.append(json.dumps(body).encode())
    return found


class Clients:
    """A closed loop over a run's requests, behind a balancer that passes over dead servers."""

    def __init__(self, urls: Sequence[str], requests: Sequence[bytes], at_fault: Callable[[], None]) -> None:
        self.answers: list[list[int]] = [[] for _ in requests]
        self.errors: list[str] = []
        self.latencies: list[float] = []
        self._urls = urls
        self._left: Iterator[tuple[int, bytes]] = iter(enumerate(requests))
        self._at_fault = at_fault

    async def run(self) -> None:
        async with aiohttp.ClientSession(trust_env=False) as session:
            await asyncio.gather(*(self._one(session) for _ in range(AT_ONCE)))

    async def _one(self, session: aiohttp.ClientSession) -> None:
        for index, body in self._left:
            began = time.monotonic()
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    self.answers[index] = await self._ask(session, index, body)
                self.latencies.append(time.monotonic() - began)
            except (aiohttp.ClientError, OSError, ValueError) as error:
                self.errors.append(f"{type(error).__name__}: {error}"[:160])
            if len(self.latencies) == BEFORE_FAULT:
                self._at_fault()

    async def _ask(self, session: aiohttp.ClientSession, index: int, body: bytes) -> list[int]:
        headers = {"Content-Type": "application/json"}
        for turn in range(len(self._urls)):
            url = self._urls[(index + turn) % len(self._urls)]
            with contextlib.suppress(aiohttp.ClientConnectorError):
                async with session.post(f"{url}/v1/chat/completions", data=body, headers=headers) as reply:
                    if reply.status != 200:
                        raise ValueError(f"HTTP {reply.status}: {(await reply.text())[:120]}")
                    return await _tokens(reply.content)
        raise ValueError("no server takes a connection")


async def _tokens(stream: aiohttp.StreamReader) -> list[int]:
    """Token ids of a streamed answer; ValueError when it is cut short."""
    found: list[int] = []
    async for line in stream:
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise ValueError(str(chunk["error"])[:120])
        for choice in chunk.get("choices", ()):
            found += choice.get("token_ids") or []
    if len(found) != TOKENS:
        raise ValueError(f"{len(found)} of {TOKENS} tokens came")
    return found


class Trials:
    """Runs every system's faults and appends each trial to a file; a server serves until a fault ends it."""

    def __init__(self, matrix: Matrix, results: Path, display: Display) -> None:
        self._matrix = matrix
        self._systems = systems(matrix)
        self._file = results / "failures.jsonl"
        self._display = display
        results.mkdir(parents=True, exist_ok=True)

    def run(self, rounds: int, names: Sequence[str]) -> None:
        for number in range(rounds):
            for name in names if number % 2 == 0 else list(reversed(names)):
                self._system(name, number)
            with serving(self._systems["triptych"], self._matrix.model) as server:
                for index, fault in enumerate(_NAMES):
                    self._keep(
                        self._trial(server, "right", Fault(fault, NOTHING.act), number, index, "right")
                    )

    def _system(self, name: str, number: int) -> None:
        with contextlib.ExitStack() as stack:
            server: Server | None = None
            for fault in FAULTS[name]:
                if server is None:
                    server = stack.enter_context(serving(self._systems[name], self._matrix.model))
                    # Its first requests are slow.
                    self._trial(server, name, NOTHING, number, 900 + number)
                self._keep(self._trial(server, name, fault, number, _NAMES.index(fault.name)))
                if fault.deadly:
                    server = None
                    stack.close()

    def _trial(
        self, server: Server, name: str, fault: Fault, number: int, index: int, salt: str = ""
    ) -> Trial:
        requests = bodies(
            self._matrix.model if name not in ("triptych", "right") else "", 10 * number + index, salt
        )
        clients = Clients(server.url.split(","), requests, lambda: fault.act(server))
        began = time.monotonic()
        asyncio.run(clients.run())
        seconds = time.monotonic() - began
        self._display.say(f"{name}, {fault.name}, {number}: {len(clients.errors)} failed in {seconds:.1f} s")
        return Trial(name, fault.name, number, seconds, clients.latencies, clients.answers, clients.errors)

    def _keep(self, trial: Trial) -> None:
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode(trial) + b"\n")


def page(trials: Sequence[Trial]) -> str:
    """The table of all trials."""
    right = {(trial.fault, trial.number): trial.answers for trial in trials if trial.system == "right"}
    rows = []
    for fault in _NAMES:
        for system in FAULTS:
            of = [trial for trial in trials if (trial.system, trial.fault) == (system, fault)]
            if not of:
                continue
            wrong = [
                sum(
                    bool(got) and got != want
                    for got, want in zip(trial.answers, right[trial.fault, trial.number], strict=True)
                )
                for trial in of
            ]
            worst = [max(trial.latencies) for trial in of]
            middle = [statistics.median(trial.latencies) for trial in of]
            rows.append(
                [
                    fault,
                    system,
                    str(sum(len(trial.answers) for trial in of)),
                    str(sum(len(trial.errors) for trial in of)),
                    str(sum(wrong)),
                    spread([len(trial.latencies) / trial.seconds for trial in of]),
                    f"{statistics.median(middle):.2f}, {max(worst):.2f}",
                ]
            )
    head = [
        "what failed",
        "system",
        "requests",
        "failed",
        "other tokens",
        "answers/s",
        "latency, s: median, worst",
    ]
    reasons = sorted(
        {f"{trial.system}, {trial.fault}: {error}" for trial in trials for error in trial.errors[:1]}
    )
    lines = [fill("failures", rounds=len({trial.number for trial in trials})), "", *table(head, rows, (0, 1))]
    return "\n".join(
        [*lines, "", "The first error of each run, without repeats:", "", *(f"- `{r}`" for r in reasons), ""]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", type=Path, nargs="?", help="folder of the peer kit; none: only the page")
    parser.add_argument("--results", type=Path, required=True, help="folder of the trials")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", default=",".join(FAULTS), help="some of them")
    add_write_flag(parser, PAGE)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    display = Display(Console(soft_wrap=True))
    try:
        if options.peer is not None:
            matrix = matrix_of("tiny", options.peer.resolve())
            Trials(matrix, options.results, display).run(options.rounds, options.systems.split(","))
        lines = (options.results / "failures.jsonl").read_bytes().splitlines()
    except ConfigError as error:
        display.warn(str(error))
        return 2
    publish(page([msgspec.json.decode(line, type=Trial) for line in lines]), PAGE, write=options.write)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Trials: the same requests to Triptych and to vLLM, every answer's tokens kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from benchmarks.against_peer.rounds import ROOT, systems_of, triptych, vllm_replicas
from benchmarks.baselines.matrix import Matrix, System
from benchmarks.baselines.servers import Server
from benchmarks.result_page import spread
from triptych_bench.goodput.load.payload import data_url
from triptych_bench.goodput.load.words import text
from triptych_bench.goodput.load.workload import Picture
from triptych_bench.goodput.report.display import Display

TOKENS, TEXT_TOKENS = 64, 60
TIMEOUT_SECONDS = 60.0
ONE_THREAD = ("--threads", "1")
#: What pictures show.
CONTENT = "photos"
#: The name of the runs that say which tokens are right.
RIGHT = "right"


class Trial(msgspec.Struct, frozen=True):
    """One system's run of a case: `answers` are the tokens of each request, empty for one that failed.

    `latencies` and `ttfts` are seconds of answered requests; `reused` and `shown`: pictures whose embedding
    was there, and all of them, where the system counts them.
    """

    system: str
    case: str
    number: int
    seconds: float
    latencies: list[float]
    answers: list[list[int]]
    errors: list[str]
    ttfts: list[float]
    content: str
    reused: float = 0.0
    shown: float = 0.0

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds


@dataclass(frozen=True, slots=True)
class Run:
    """What a command line asks for; `seconds` of sending in a window at a rate."""

    matrix: Matrix
    systems: Mapping[str, System]
    names: Sequence[str]
    rounds: int
    seconds: float
    folder: Path
    display: Display


def systems(matrix: Matrix) -> dict[str, System]:
    """Two of everything for Triptych and for vLLM alone; vLLM's EPD as the baselines have it."""
    words = ("--encoders", "2", "--pd-workers", "2", *ONE_THREAD)
    return {
        "triptych": triptych(matrix.name, "triptych", ROOT, words),
        "replicas": vllm_replicas(matrix.named("vllm")),
        "vllm-epd": systems_of(matrix, None)["vllm-epd"],
    }


def body(
    seed: int, picture: Picture | None, *, model: str, salt: str = "", question_first: bool = False
) -> bytes:
    """A request for TOKENS tokens, with a question that `seed` decides."""
    content: list[dict[str, object]] = [{"type": "text", "text": text(TEXT_TOKENS, seed)}]
    if picture is not None:
        shown: dict[str, object] = {"type": "image_url", "image_url": {"url": data_url(picture).decode()}}
        content.insert(len(content) if question_first else 0, shown)
    result: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    return json.dumps(result | ({"cache_salt": salt} if salt else {})).encode()


class Clients:
    """A closed loop over a run's requests, behind a balancer that passes over dead servers.

    Request i begins with server `first` + i. `at` answers `act` is called.
    """

    def __init__(
        self, server: Server, requests: Sequence[bytes], at_once: int, *, first: int = 0, at: int = 0,
        act: Callable[[Server], None] = lambda _server: None,
    ) -> None:  # fmt: skip
        self.answers: list[list[int]] = [[] for _ in requests]
        self.errors: list[str] = []
        self.latencies: list[float] = []
        self.ttfts: list[float] = []
        self._server, self._urls = server, server.url.split(",")
        self._left: Iterator[tuple[int, bytes]] = iter(enumerate(requests))
        self._at_once, self._first, self._at, self._act = at_once, first, at, act

    def trial(self, system: str, case: str, number: int, display: Display) -> Trial:
        """Asks everything."""
        began = time.monotonic()
        asyncio.run(self._run())
        seconds = time.monotonic() - began
        display.say(f"{system}, {case}, {number}: {len(self.errors)} failed in {seconds:.1f} s")
        return Trial(
            system, case, number, seconds, self.latencies, self.answers, self.errors, self.ttfts, CONTENT
        )

    async def _run(self) -> None:
        async with aiohttp.ClientSession(trust_env=False) as session:
            await asyncio.gather(*(self._one(session) for _ in range(self._at_once)))

    async def _one(self, session: aiohttp.ClientSession) -> None:
        for index, request in self._left:
            began = time.monotonic()
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    first, self.answers[index] = await self._ask(session, index, request)
                self.latencies.append(time.monotonic() - began)
                self.ttfts.append(first - began)
            except (aiohttp.ClientError, OSError, ValueError) as error:
                self.errors.append(f"{type(error).__name__}: {error}"[:160])
            if len(self.latencies) == self._at:
                self._act(self._server)

    async def _ask(
        self, session: aiohttp.ClientSession, index: int, request: bytes
    ) -> tuple[float, list[int]]:
        headers = {"Content-Type": "application/json"}
        for turn in range(len(self._urls)):
            url = self._urls[(self._first + index + turn) % len(self._urls)]
            with contextlib.suppress(aiohttp.ClientConnectorError):
                async with session.post(f"{url}/v1/chat/completions", data=request, headers=headers) as reply:
                    if reply.status != 200:
                        raise ValueError(f"HTTP {reply.status}: {(await reply.text())[:120]}")
                    return await tokens_of(reply.content)
        raise ValueError("no server takes a connection")


async def tokens_of(
    stream: aiohttp.StreamReader, came: Callable[[], None] = lambda: None
) -> tuple[float, list[int]]:
    """When the first token of a streamed answer came, and all; ValueError when it is cut short.

    `came` is called whenever there are some.
    """
    result: list[int] = []
    first = 0.0
    async for line in stream:
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise ValueError(str(chunk["error"])[:120])
        for choice in chunk.get("choices", ()):
            if tokens := choice.get("token_ids"):
                result += tokens
                came()
        first = first or (time.monotonic() if result else 0.0)
    if len(result) != TOKENS:
        raise ValueError(f"{len(result)} of {TOKENS} tokens came")
    return first, result


def totals(trials: Sequence[Trial], everything: Sequence[Trial]) -> list[str]:
    """Requests, failed ones, answers with other tokens than the right ones, answers per second."""
    right = {(trial.case, trial.number): trial.answers for trial in everything if trial.system == RIGHT}
    wrong = [
        bool(got) and got != want
        for trial in trials
        for got, want in zip(trial.answers, right.get((trial.case, trial.number), []), strict=False)
    ]
    counts = [
        sum(len(trial.answers) for trial in trials),
        sum(len(trial.errors) for trial in trials),
        sum(wrong),
    ]
    return [*map(str, counts), spread([trial.rate for trial in trials])]

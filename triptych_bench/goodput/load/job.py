"""The load generator's input and output: its job, its progress, the record of each request, its report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from triptych.base.types import JsonObject
from triptych_bench.goodput.load.workload import PlannedRequest


@dataclass(frozen=True, slots=True)
class Target:
    """An OpenAI-compatible server. `url` is without /v1. `extra` is added to every body.

    `replicas` are further servers like it: requests go to all of them in turn.

    `first_token`: "chunk" takes the first chunk with a choice, as `vllm bench serve` does; "text" the first
    with text, for servers that send the role before they have a token.
    """

    url: str
    model: str
    api_key: str = ""
    ignore_eos: bool = True
    timings: bool = True
    first_token: str = "chunk"
    extra: JsonObject = field(default_factory=dict)
    replicas: tuple[str, ...] = ()

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url, *self.replicas)


@dataclass(frozen=True, slots=True)
class LoadJob:
    """One window. With `concurrency` the planned times are ignored: that many requests are kept in flight.

    The first `warm_up` requests are sent and not measured. `timeout` is in seconds of one request.
    """

    target: Target
    schedule: tuple[tuple[float, PlannedRequest], ...]
    warm_up: int = 0
    concurrency: int = 0
    timeout: float = 120.0
    words_per_token: float = 1.0


@dataclass(frozen=True, slots=True)
class WindowReport:
    """`cpu_share`: CPU seconds of the generator per second of the window; `started`: Unix time."""

    records: tuple[RequestRecord, ...]
    cpu_share: float
    wall: float
    started: float


@dataclass(frozen=True, slots=True)
class Progress:
    """Requests of a window so far."""

    sent: int
    done: int
    failed: int
    total: int


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Times in seconds: `planned` and `sent` since the window's start, the rest since the request was sent.

    `error` is empty for a request that ended as asked. `stages` and `caches` are the server's own
    account, empty where it gives none.
    """

    index: int
    planned: float
    sent: float
    images: int = 0
    ttft: float = math.inf
    e2e: float = math.inf
    itls: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    asked_tokens: int = 0
    counted_by: str = "usage"
    error: str = ""
    stages: Mapping[str, float] = field(default_factory=dict)
    caches: tuple[str, ...] = ()
    warm_up: bool = False

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def late(self) -> float:
        """How much later than planned it was sent."""
        return self.sent - self.planned

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first; 0 with one token, as vLLM counts it."""
        if self.output_tokens <= 1:
            return 0.0
        return (self.e2e - self.ttft) / (self.output_tokens - 1)

    def latencies(self) -> dict[str, float]:
        """Seconds by the names of an SLO; a failure is infinitely late."""
        if not self.ok:
            return dict.fromkeys(("ttft", "tpot", "e2el"), math.inf)
        return {"ttft": self.ttft, "tpot": self.tpot, "e2el": self.e2e}

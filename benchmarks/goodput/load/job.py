"""The load generator's input and output: its job, its progress, its report."""

from __future__ import annotations

from dataclasses import dataclass, field

from triptych.goodput.load.record import RequestRecord
from triptych.goodput.load.workload import PlannedRequest
from triptych.types import JsonObject


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

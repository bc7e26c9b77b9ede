"""Ports of the proxy's core: what its parts report to each other, and how it reaches the workers.

The dispatcher implements `RequestEvents`. `Transport` opens everything that goes to a worker: over gRPC in
the product (`triptych.proxy.service`), in virtual time in the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from triptych.base.tracing.context import SpanContext
from triptych.base.types import EmbeddingSource, PositionLogprobs
from triptych.protos import encoder_pb2, pd_pb2
from triptych.proxy.events import RequestEvent
from triptych.proxy.media.source import ItemMedia


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """Loss of a PD worker's process, and the requests that it had then.

    Its signs: its stream broke and was not established again in time; another process answers at its
    address; it gives no answer over a connection that stands (`final`, whatever it does later). No signs:
    requests that it hands over, as when it drains; a stream that it has ended itself; a connection that is
    back in time.
    """

    address: str
    incarnation: str
    requests: tuple[str, ...]
    final: bool


@dataclass(frozen=True, slots=True)
class PDLoadReport:
    """Load of a PD worker with the requests of all proxies, as it reports it; usages are shares, 0 to 1."""

    running: int
    waiting: int
    kv_usage: float
    cache_usage: float
    tokens_per_second: float


class RequestEvents(Protocol):
    """Receiver of events of requests in flight, by request id. Those of a request that has ended, or of an
    attempt that is over, are ignored."""

    @property
    def with_logprobs(self) -> Collection[str]:
        """Requests whose log-probabilities are read from the stream."""

    def deliver(self, request_id: str, event: RequestEvent) -> None: ...

    def tokens(
        self,
        request_id: str,
        attempt: int,
        position: int,
        token_ids: list[int],
        text: str,
        logprobs: Sequence[PositionLogprobs] = (),
    ) -> None:
        """The one event that is no object: it comes for every token of every request."""


class JobStream(Protocol):
    """Stream of one try of an encoder job; opened with the first `result`."""

    @property
    def media_sent(self) -> bool:
        """Whether the worker has the whole item, and may be at work on it."""

    def run(self) -> None:
        """Permits the tower."""

    async def result(self) -> encoder_pb2.EncodeEvent:
        """The try's end, `ready` or `failed`. Unavailable when the worker is silent for too long; grpc errors
        pass through."""

    async def close(self) -> None:
        """Ends the stream once its result has been delivered; takes a second at most."""


class Link(Protocol):
    """Connection to one PD worker: unary calls out, one stream of events back."""

    address: str
    #: Whether the stream stands.
    attached: bool
    #: Whether the worker's engine stands still: it gets nothing new.
    set_aside: bool

    @property
    def in_flight(self) -> int:
        """Requests on the stream."""

    def open_to(self, tenant: str) -> bool:
        """Whether one more Submit of the tenant may be unanswered."""

    def track(self, request_id: str, attempt: int, received: Sequence[int], tenant: str = "") -> None:
        """Delivers the request's events from now on; `received` grows with its output tokens."""

    def forget(self, request_id: str) -> None:
        """Delivers them no longer."""

    async def submit(self, message: pd_pb2.SubmitRequest) -> pd_pb2.SubmitReply:
        """Hands a tracked request over. grpc errors pass through."""

    async def set_apart(self, request_id: str, tokens: int) -> bool:
        """Has the worker hand over all else that it holds; False where it will not."""

    def notify(self, mm_hashes: Sequence[str], sources: Mapping[str, EmbeddingSource]) -> None:
        """These items are in the store, or at their sources."""

    def cancel(self, request_id: str) -> None:
        """Ends a request there."""

    def pause(self, request_id: str, paused: bool) -> None:
        """Has it put out nothing there, or go on; of a worker that can."""

    def load(self, now: float) -> PDLoadReport | None:
        """The worker's newest report; None where it sends none."""

    def check(self, now: float) -> bool:
        """Whether `set_aside` has changed. Called every second."""

    def give_up(self, *, silent: bool = False) -> None:
        """The worker has stalled or gone, or is `silent` and may come back: its requests go on elsewhere."""

    async def close(self) -> None: ...


class LinkOwner(Protocol):
    """Owner of links to PD workers."""

    def attached(self, incarnation: str) -> None:
        """A stream stands; `incarnation` of the process at its other end, empty where it does not say."""

    def stepped(self) -> None:
        """All events of one message have been delivered."""

    def ended(self, end: ProcessEnd) -> None:
        """A worker's process is lost; its requests' `lost` follow."""


class Transport(Protocol):
    """Opens streams to workers by their addresses."""

    def open_job(
        self,
        address: str,
        job: encoder_pb2.EncodeJob,
        media: ItemMedia,
        planned: Callable[[str, encoder_pb2.EncodeEvent], None],
        trace: SpanContext | None = None,
    ) -> JobStream:
        """`planned` gets the job's id and the event once the worker has preprocessed the item; `trace` is the
        span that the worker's go under."""

    def open_link(self, address: str, events: RequestEvents, owner: LinkOwner) -> Link: ...

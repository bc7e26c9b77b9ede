"""Events of one request, as its views get them. Its instructions are among them; its tokens are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from triptych.base.types import PDTimings, Usage
from triptych.proxy.encoders.job import JobRetried
from triptych.proxy.ports import JobReady
from triptych.proxy.requests.instructions import EndAttempt, Instruction, SkipJob, StartJobs, Submit


class Fetched(msgspec.Struct, frozen=True):
    """Its media are there, split and hashed, in so many seconds; `mm_hashes` are its items in order."""

    mm_hashes: tuple[str, ...]
    seconds: float


class LookedUp(msgspec.Struct, frozen=True):
    """The store has answered: these items are in it."""

    stored: tuple[str, ...]


class JobsStarted(msgspec.Struct, frozen=True):
    """Its encoder jobs are asked for; where they were there for another request, its origins say so."""

    mm_hashes: tuple[str, ...]


class PlanReported(msgspec.Struct, frozen=True):
    """An encoder worker has preprocessed the item."""

    mm_hash: str


class ItemReady(msgspec.Struct, frozen=True):
    """An encoder job has ended with the item's embedding in the store."""

    mm_hash: str
    end: JobReady


class FirstToken(msgspec.Struct, frozen=True):
    """The first token has come."""


class AttemptEvent(msgspec.Struct, frozen=True):
    """An event at the PD worker of an attempt; the attempt may be over."""

    attempt: int


class Accepted(AttemptEvent, frozen=True):
    """A PD worker has taken the request."""


class Admitted(AttemptEvent, frozen=True):
    """The PD worker has reserved memory for it."""


class LoadReported(AttemptEvent, frozen=True):
    """The PD worker has the item; it was resident where `seconds` is 0."""

    mm_hash: str
    seconds: float


class MissReported(AttemptEvent, frozen=True):
    """The PD worker did not find the item."""

    mm_hash: str


class Finished(AttemptEvent, frozen=True):
    """The answer is complete."""

    usage: Usage
    spent: PDTimings


class Ended(msgspec.Struct, frozen=True):
    """The request has ended in any way."""


class CallEnded(msgspec.Struct, frozen=True):
    """All choices of its call have ended; an event of the first one. 499: the client has left."""

    status: int
    prompt_tokens: int
    completion_tokens: int
    first_token: float | None


#: Events of items.
ItemEvent = (
    LookedUp
    | StartJobs
    | JobsStarted
    | PlanReported
    | JobRetried
    | ItemReady
    | SkipJob
    | LoadReported
    | MissReported
)
#: Events of the whole request, of which a timeline has moments.
StageEvent = Fetched | Submit | Accepted | Admitted | FirstToken | Finished | EndAttempt
Event = Instruction | ItemEvent | StageEvent | Ended | CallEnded


class RequestView(Protocol):
    """A view of one request's events. An instruction is seen before it is carried out."""

    def observe(self, event: Event, at: float, address: str, origins: Mapping[str, str]) -> None:
        """`at` is a moment of the proxy's clock, `address` that of the attempt's PD worker; `origins` say
        where the items' embeddings come from."""

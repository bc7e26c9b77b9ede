"""Events of requests in flight, one typed union: `RequestEvents.deliver` hands each to its state machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from triptych.base.errors import RequestError
from triptych.base.types import EmbeddingSource, ItemPlan, PDTimings, Usage
from triptych.proxy.call.chat import Started

#: The store's epoch and the jumps of its clock, both of which change where it loses everything.
StoreEpoch = tuple[str, int]


@dataclass(frozen=True, slots=True)
class JobReady:
    """The success of an encoder job: the embedding is in the store."""

    plan: ItemPlan
    already_stored: bool
    encode_seconds: float
    save_seconds: float
    #: The item's part of `encode_seconds`, which are those of its batch; 0 where the worker does not tell.
    work_seconds: float = 0.0
    preprocess_seconds: float = 0.0
    #: The encoder worker's.
    address: str = ""
    epoch: StoreEpoch = ("", 0)
    #: Where it can be read besides the store, into which its save may still go on.
    source: EmbeddingSource | None = None


class Fetched(msgspec.Struct, frozen=True):
    """Its media are fetched, split and hashed, which took `seconds`.

    `params`: the request field of each distinct item by its key, in order of its first slot; `titles`: what
    people know it by, in this order, empty of most.
    """

    params: Mapping[str, str]
    seconds: float
    titles: tuple[str, ...] = ()


class LookedUp(msgspec.Struct, frozen=True):
    """The store has answered: the plans of items that it holds. `expected` are those of further ones that a
    PD worker is expected to hold: they are encoded only if it reports them missing."""

    plans: Mapping[str, ItemPlan]
    expected: Mapping[str, ItemPlan] = {}
    epoch: StoreEpoch = ("", 0)


class JobsStarted(msgspec.Struct, frozen=True):
    """Its encoder jobs are asked for: each item is "encoded", or its job is another request's ("joined")."""

    origins: Mapping[str, str]


class ItemPlanned(msgspec.Struct, frozen=True):
    """An encoder worker has preprocessed the item: its rows and placeholder are known."""

    mm_hash: str
    plan: ItemPlan


class JobRetried(msgspec.Struct, frozen=True):
    """A try of the item's job at the worker has failed; another one follows."""

    mm_hash: str
    address: str
    why: str


class ItemReady(msgspec.Struct, frozen=True):
    """An encoder job has ended with the item's embedding in the store."""

    mm_hash: str
    end: JobReady


class JobFailed(msgspec.Struct, frozen=True):
    """The item cannot be encoded at all."""

    mm_hash: str
    error: RequestError


class EncodersGone(msgspec.Struct, frozen=True):
    """No encoder worker serves the request's namespace, and none has for a while."""


class EncodersBack(msgspec.Struct, frozen=True):
    """An encoder worker serves the request's namespace again."""


class AttemptEvent(msgspec.Struct, frozen=True):
    """An event at the PD worker of an attempt; ignored where the attempt is over."""

    attempt: int


class Accepted(AttemptEvent, frozen=True):
    """A PD worker has taken the request."""


class Refused(AttemptEvent, frozen=True):
    """The PD worker will not serve the request, and no other one would."""

    error: RequestError


class Lost(AttemptEvent, frozen=True):
    """The PD worker is gone, has stalled or does not know the request. `back_off`: it gave the request up,
    which keeps away from it for a moment."""

    back_off: bool = False


class Admitted(AttemptEvent, frozen=True):
    """The PD worker has expanded the prompt and reserved memory for all items."""

    started: Started
    placements: Sequence[tuple[int, int]]


class LoadReported(AttemptEvent, frozen=True):
    """The PD worker has the item; it was resident where `seconds` is 0."""

    mm_hash: str
    seconds: float = 0.0
    #: "store", "shm" or "peer"; "" where it was resident, or the worker does not tell.
    path: str = ""


class MissReported(AttemptEvent, frozen=True):
    """The embedding was evicted or damaged before the PD worker had it."""

    mm_hash: str
    damaged_digest: str = ""


class FirstToken(msgspec.Struct, frozen=True):
    """The first token has come."""


class Finished(AttemptEvent, frozen=True):
    """The PD worker has generated the whole answer; `spent` is what each of its stages took."""

    reason: str
    usage: Usage
    spent: PDTimings | None = None
    stop_sequence: str = ""
    pooled: bytes = b""


class RequestFailed(msgspec.Struct, frozen=True):
    """The proxy ends the request."""

    error: RequestError


class ClientLeft(msgspec.Struct, frozen=True):
    """The client has closed the stream, or has the whole answer."""


class DeadlinePassed(msgspec.Struct, frozen=True):
    """The request's time is over. `queued`: it waits in the proxy for a PD worker; `encoders`: one serves."""

    queued: bool = False
    encoders: bool = True


class Ended(msgspec.Struct, frozen=True):
    """The request has ended in any way; an event of its views alone, as the next one."""


class CallEnded(msgspec.Struct, frozen=True):
    """All choices of its call have ended; an event of the first one. 499: the client has left."""

    status: int
    prompt_tokens: int
    completion_tokens: int
    first_token: float | None


#: Events of items on their way into the store.
ItemEvent = LookedUp | JobsStarted | ItemPlanned | JobRetried | ItemReady | JobFailed
#: Events of an attempt at its PD worker.
WorkerEvent = Accepted | Refused | Lost | Admitted | LoadReported | MissReported | Finished
RequestEvent = (
    ItemEvent
    | WorkerEvent
    | Fetched
    | EncodersGone
    | EncodersBack
    | FirstToken
    | RequestFailed
    | ClientLeft
    | DeadlinePassed
)

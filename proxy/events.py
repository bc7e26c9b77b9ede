"""Events of requests in flight, one typed union: `RequestEvents.deliver` hands each to its state machine."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from triptych.base.errors import RequestError
from triptych.base.types import ItemPlan
from triptych.protos import encoder_pb2, pd_pb2

#: What an encoder worker says of an item's job, or the proxy itself. `waits` is the proxy's: the job is asked
#: for. `failed` ends the request, unless it is retryable: another try follows then.
JobEvent = encoder_pb2.EncodeEvent
#: What a PD worker says of a request, or the proxy itself of its worker.
WorkerEvent = pd_pb2.RequestEvent
#: The store's epoch and the jumps of its clock, both of which change where it loses everything.
StoreEpoch = tuple[str, int]


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


class EncodersGone(msgspec.Struct, frozen=True):
    """No encoder worker serves the request's namespace, and none has for a while."""


class EncodersBack(msgspec.Struct, frozen=True):
    """An encoder worker serves the request's namespace again."""


class Accepted(msgspec.Struct, frozen=True):
    """A PD worker has taken the attempt; ignored where that is over, as the next one and a `WorkerEvent`."""

    attempt: int


class Refused(msgspec.Struct, frozen=True):
    """The PD worker will not serve the attempt's request, and no other one would."""

    attempt: int
    error: RequestError


def lost(attempt: int) -> WorkerEvent:
    """The attempt's PD worker is gone, has stalled or does not know the request."""
    return WorkerEvent(attempt=attempt, lost=pd_pb2.Lost())


class SuccessorSent(msgspec.Struct, frozen=True):
    """A decode worker is sent the attempt that is to take over, with the output so far."""

    attempt: int


class SuccessorBegun(msgspec.Struct, frozen=True):
    """That attempt has put out its first tokens, at this position of the output."""

    attempt: int
    position: int


class FirstToken(msgspec.Struct, frozen=True):
    """The first token has come."""


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
ItemEvent = LookedUp | JobEvent
#: Events of an attempt at its PD worker.
AttemptEvent = Accepted | Refused | WorkerEvent
RequestEvent = (
    ItemEvent
    | AttemptEvent
    | Fetched
    | EncodersGone
    | EncodersBack
    | SuccessorSent
    | SuccessorBegun
    | FirstToken
    | RequestFailed
    | ClientLeft
    | DeadlinePassed
)


def told(event: object) -> str:
    """The alternative of an event that is a worker's message; "" of any other event."""
    return (event.WhichOneof("body") or "") if isinstance(event, JobEvent | WorkerEvent) else ""


def served(event: WorkerEvent) -> bool:
    """Whether it is the end of the whole answer."""
    return event.HasField("finished") and event.finished.reason not in ("error", "abort")

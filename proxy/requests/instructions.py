"""Instructions of a request's state machine: what its events have the dispatcher do."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.base.errors import RequestError
from triptych.protos.pd_pb2 import KVHandOff
from triptych.proxy.call.chat import Output
from triptych.proxy.events import WorkerEvent


@dataclass(frozen=True, slots=True)
class LookUpItems:
    """Ask the store for these items."""

    mm_hashes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartJobs:
    """Have these items encoded; `damaged_digest` is of a stored value that could not be read. `expected`: not
    found where they were expected, at the PD worker. `pause` are the seconds to wait before."""

    mm_hashes: tuple[str, ...]
    re_encode: bool = False
    damaged_digest: str = ""
    expected: bool = False
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Submit:
    """Hand the request to a PD worker, as its state machine has it. `resumes`: it goes on from the prompt and
    the output of an earlier attempt."""

    attempt: int
    resumes: bool = False


@dataclass(frozen=True, slots=True)
class HandOver:
    """Submit the request to a decode worker as its next attempt, while the present one goes on. `behind`: it
    has begun there, too far behind what has come meanwhile, and begins again. `kv`: what the present one has
    just left for it, if that is more than what is found by content."""

    attempt: int
    behind: bool = False
    kv: KVHandOff | None = None


@dataclass(frozen=True, slots=True)
class TakeOver:
    """The decode worker's attempt is the request's from now on; the prefill worker frees it. `lost`: that one
    was lost before the decode worker had begun."""

    attempt: int
    lost: bool = False


@dataclass(frozen=True, slots=True)
class KeepAttempt:
    """No decode worker takes the request over any more: its worker keeps it."""


@dataclass(frozen=True, slots=True)
class TellJobs:
    """Tell the encoder jobs what the PD worker says: it has memory for all items, so that their jobs may run;
    it has an item, or found it missing, which frees the item's part of the share; or, `held`, it has one that
    was expected there, so that no job is made."""

    event: WorkerEvent
    held: bool = False

    @property
    def mm_hash(self) -> str:
        """The item that it is about; empty of an admission."""
        return self.event.item_loaded.mm_hash or self.event.item_missing.mm_hash


@dataclass(frozen=True, slots=True)
class NotifyItems:
    """Report to the PD worker that these items are in the store."""

    mm_hashes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EndAttempt:
    """Free all that the attempt holds. `cancel`: the PD worker may still run it, and is sent a cancellation
    with the next attempt, or `now`. `back_off`: the next one goes elsewhere where it can."""

    cancel: bool
    now: bool = False
    back_off: bool = False


@dataclass(frozen=True, slots=True)
class Emit:
    """Send the output to the client. Tokens need none: `Lifecycle.tokens` returns their Delta."""

    output: Output


@dataclass(frozen=True, slots=True)
class Fail:
    """End the client's stream with this error."""

    error: RequestError


@dataclass(frozen=True, slots=True)
class Leave:
    """Drop the request: it waits for no job and no PD worker any more."""


#: Instructions about encoder jobs.
JobInstruction = LookUpItems | StartJobs | TellJobs
#: Instructions about the hand-over of a request from a prefill to a decode worker.
HandOverInstruction = HandOver | TakeOver | KeepAttempt
Instruction = JobInstruction | HandOverInstruction | Submit | NotifyItems | EndAttempt | Emit | Fail | Leave

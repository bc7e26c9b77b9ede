"""The life of one request as a state machine without I/O: events in, instructions out.

begin -> (look up -> plan what is missing) -> submit -> admitted -> items ready, loaded -> tokens -> finished
                                                ^--- attempt + 1 from what has been received ---|

While nobody can encode what is missing, a request waits without an attempt.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from triptych.errors import DeadlineExceeded, RequestError, Unavailable
from triptych.proxy.call.chat import Delta, Done, Output, Started, Timings
from triptych.types import FinishReason, ItemPlan, Usage

#: An embedding that is lost this often is answered with 503.
MAX_LOSSES = 3
RETRY_AFTER = 2.0
OPTIONS = "mm_processor_kwargs"


def _plain(error: RequestError) -> str:
    """The message without the worker's own name for the item."""
    return error.message.removeprefix(f"{error.param}: ") if error.param else error.message


class Phase(enum.Enum):
    NEW = enum.auto()
    LOOK_UP = enum.auto()
    PLAN = enum.auto()
    SUBMIT = enum.auto()
    RUN = enum.auto()
    #: Planned, at no PD worker, for want of an encoder.
    WAIT = enum.auto()
    ENDED = enum.auto()


@dataclass(frozen=True, slots=True)
class ResumeState:
    """What an earlier attempt has shown: the expanded prompt and its output so far."""

    prompt_token_ids: tuple[int, ...]
    placements: tuple[tuple[int, int], ...]
    output_token_ids: tuple[int, ...]
    text_sent_chars: int


@dataclass(frozen=True, slots=True)
class LookUp:
    mm_hashes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartJobs:
    mm_hashes: tuple[str, ...]
    re_encode: bool = False
    damaged_digest: str = ""


@dataclass(frozen=True, slots=True)
class Submit:
    """Hand the request to a PD worker; `ready` are the keys that are stored now."""

    attempt: int
    resume: ResumeState | None
    ready: frozenset[str]


@dataclass(frozen=True, slots=True)
class AdmitJobs:
    """The PD worker has room for all items: jobs of this request may run."""


@dataclass(frozen=True, slots=True)
class NotifyItems:
    mm_hashes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReturnShare:
    """The item is loaded, or gone: its bytes are no longer published and unread."""

    mm_hash: str


@dataclass(frozen=True, slots=True)
class EndAttempt:
    """All that the attempt held at a PD worker is gone; `cancel` when the worker may not know.

    It hears of that with the next attempt, or now.
    """

    cancel: bool
    now: bool = False


@dataclass(frozen=True, slots=True)
class Emit:
    """Show the output to the client. Tokens go without it: `Lifecycle.tokens` returns their Delta."""

    output: Output


@dataclass(frozen=True, slots=True)
class Fail:
    error: RequestError


@dataclass(frozen=True, slots=True)
class Leave:
    """The request has ended: its jobs lose a waiter."""


Instruction = (
    LookUp | StartJobs | Submit | AdmitJobs | NotifyItems | ReturnShare | EndAttempt | Emit | Fail | Leave
)


class Lifecycle:
    """One request. `params` gives the request field of each distinct key, in order of its first slot."""

    def __init__(self, params: Mapping[str, str]) -> None:
        self._params = dict(params)
        self.phase = Phase.NEW
        self.attempt = 0
        self.plans: dict[str, ItemPlan] = {}
        self.ready: set[str] = set()
        self.timings = Timings()
        #: What the request waits for that is not there; names the error at the deadline.
        self.lacking = ""
        self.output_token_ids: list[int] = []
        self.prompt_token_ids: tuple[int, ...] | None = None
        self._placements: tuple[tuple[int, int], ...] = ()
        self._text_chars = 0
        self._losses: dict[str, int] = {}
        self._told: frozenset[str] | set[str] = frozenset()

    @property
    def ended(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def lacks_items(self) -> bool:
        """Whether it waits at, or for, a PD worker with an item that is not in the store."""
        return self.phase in (Phase.SUBMIT, Phase.RUN, Phase.WAIT) and len(self.ready) < len(self._params)

    def begin(self) -> list[Instruction]:
        if not self._params:
            return self._submit()
        self.phase = Phase.LOOK_UP
        return [LookUp(tuple(self._params))]

    def looked_up(self, plans: Mapping[str, ItemPlan]) -> list[Instruction]:
        """The store's answer: the plans of the items that it holds."""
        if self.phase is not Phase.LOOK_UP:
            return []
        self.plans.update(plans)
        self.ready.update(plans)
        misses = tuple(key for key in self._params if key not in plans)
        if not misses:
            return self._submit()
        self.phase = Phase.PLAN
        return [StartJobs(misses)]

    def planned(self, mm_hash: str, plan: ItemPlan) -> list[Instruction]:
        if self.ended:
            return []
        self.plans.setdefault(mm_hash, plan)
        if self.phase is Phase.PLAN and len(self.plans) == len(self._params):
            return self._submit()
        return []

    def item_ready(self, mm_hash: str, plan: ItemPlan) -> list[Instruction]:
        """The embedding is in the store."""
        if self.ended:
            return []
        self.ready.add(mm_hash)
        instructions = self.planned(mm_hash, plan)
        if self.phase is Phase.RUN:
            instructions.append(NotifyItems((mm_hash,)))
        elif self.phase is Phase.WAIT and not self.lacks_items:
            return self._submit()
        return instructions

    def encoders_gone(self) -> list[Instruction]:
        """Nobody can encode what is missing: the room at the PD worker is for others meanwhile."""
        if not self.lacks_items or self.phase is Phase.WAIT:
            return []
        self.phase = Phase.WAIT
        self.attempt += 1  # what the old one still says counts no more
        return [EndAttempt(cancel=True, now=True)]

    def encoders_back(self) -> list[Instruction]:
        return self._submit() if self.phase is Phase.WAIT else []

    def job_failed(self, mm_hash: str, error: RequestError) -> list[Instruction]:
        """No encoder will ever encode the item; the error names the field that holds it, or the option."""
        if self.ended:
            return []
        if error.param is not None and error.param.startswith(OPTIONS):
            return self._fail(error)
        param = self._params.get(mm_hash)
        message = f"{param}: {_plain(error)}" if param else error.message
        return self._fail(type(error)(message, param=param, retry_after=error.retry_after))

    def accepted(self, attempt: int) -> list[Instruction]:
        """The worker has taken the request. Items that became ready meanwhile are told now."""
        if attempt != self.attempt or self.phase is not Phase.SUBMIT:
            return []
        self.phase = Phase.RUN
        news = tuple(sorted(self.ready - self._told))
        return [NotifyItems(news)] if news else []

    def refused(self, attempt: int, error: RequestError) -> list[Instruction]:
        if attempt != self.attempt or self.ended:
            return []
        return self._fail(error)

    def admitted(
        self,
        attempt: int,
        prompt_token_ids: Sequence[int],
        placements: Iterable[tuple[int, int]],
        started: Started | None = None,
    ) -> list[Instruction]:
        if attempt != self.attempt or self.ended:
            return []
        instructions: list[Instruction] = self.accepted(attempt)
        instructions.append(AdmitJobs())
        if self.prompt_token_ids is None:
            self.prompt_token_ids = tuple(prompt_token_ids)
            self._placements = tuple(placements)
            instructions.append(Emit(self._with_frames(started or Started(self.prompt_token_ids))))
        return instructions

    def _with_frames(self, started: Started) -> Started:
        audio = [plan.grid_thw for plan in self.plans.values() if plan.modality == "audio"]
        return replace(started, frames=audio[0]) if audio else started

    def item_loaded(self, attempt: int, mm_hash: str) -> list[Instruction]:
        if attempt != self.attempt or self.ended:
            return []
        return [ReturnShare(mm_hash)]

    def item_missing(self, attempt: int, mm_hash: str, damaged_digest: str) -> list[Instruction]:
        """The embedding was evicted or damaged before the worker had it: encode it again.

        Of an item that is not ready it is no news, its job is under way: the worker tells a loss again on
        every new stream, and one request's loss to all that wait for the item.
        """
        if attempt != self.attempt or self.ended or mm_hash not in self.ready:
            return []
        self.ready.discard(mm_hash)
        self._losses[mm_hash] = self._losses.get(mm_hash, 0) + 1
        if self._losses[mm_hash] >= MAX_LOSSES:
            return self._fail(
                Unavailable("the store keeps losing this item's embedding", retry_after=RETRY_AFTER)
            )
        return [ReturnShare(mm_hash), StartJobs((mm_hash,), True, damaged_digest)]

    def tokens(
        self, attempt: int, position: int, token_ids: list[int], text: str
    ) -> Delta | Sequence[Instruction]:
        """New output, the Delta to show; frames that have been seen are dropped, a gap ends the attempt.

        Called for every token, so the plain case makes nothing but the Delta, which takes `token_ids` over.
        """
        if attempt != self.attempt or self.phase is Phase.ENDED:
            return ()
        ids = self.output_token_ids
        if position != len(ids):
            return () if position + len(token_ids) <= len(ids) else self.worker_lost(attempt)
        ids += token_ids
        self._text_chars += len(text)
        return Delta(text, token_ids)

    def finished(self, attempt: int, reason: str, usage: Usage) -> list[Instruction]:
        """The worker has ended the request with an answer."""
        if attempt != self.attempt or self.ended:
            return []
        done = Done(FinishReason(reason), usage, self.timings)
        self.phase = Phase.ENDED
        return [EndAttempt(cancel=False), Leave(), Emit(done)]

    def worker_lost(self, attempt: int, *, cancel: bool = True) -> list[Instruction]:
        """The worker is gone, has stalled or does not know the request: go on elsewhere."""
        if attempt != self.attempt or self.phase not in (Phase.SUBMIT, Phase.RUN):
            return []
        return [EndAttempt(cancel=cancel), *self._submit()]

    def client_gone(self) -> list[Instruction]:
        return [] if self.ended else self._end()

    def fail(self, error: RequestError) -> list[Instruction]:
        return [] if self.ended else self._fail(error)

    def deadline(self) -> list[Instruction]:
        """The request's time is over: 503 when something was not there at all, else 504."""
        if self.lacking:
            message = f"no {self.lacking} could be reached in time"
            return self.fail(Unavailable(message, retry_after=RETRY_AFTER))
        return self.fail(DeadlineExceeded("the request took longer than its timeout"))

    def _submit(self) -> list[Instruction]:
        self.phase = Phase.SUBMIT
        self.attempt += 1
        self._told = frozenset(self.ready)
        resume = None
        if self.prompt_token_ids is not None:
            resume = ResumeState(
                self.prompt_token_ids, self._placements, tuple(self.output_token_ids), self._text_chars
            )
        return [Submit(self.attempt, resume, self._told)]

    def _fail(self, error: RequestError) -> list[Instruction]:
        return [*self._end(), Fail(error)]

    def _end(self) -> list[Instruction]:
        submitted = self.phase in (Phase.SUBMIT, Phase.RUN)
        self.phase = Phase.ENDED
        return [EndAttempt(cancel=submitted), Leave()] if submitted else [Leave()]

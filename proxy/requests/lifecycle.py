"""State machine of one request, without I/O: events in, instructions out.

begin -> (look up -> plan what is missing) -> submit -> admitted -> items ready, loaded -> tokens -> finished
                                                ^--- attempt + 1 from what has been received ---|

While no encoder worker serves what is missing, the request waits without an attempt. Its attributes change
only through its events; everything else reads them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from triptych.base.errors import RETRY_AFTER, DeadlineExceeded, RequestError, Unavailable
from triptych.base.types import FinishReason, ItemPlan, PDTimings, Usage
from triptych.proxy.call.chat import Delta, Done, Started, Timings
from triptych.proxy.requests.instructions import (
    AdmitJobs,
    Emit,
    EndAttempt,
    Fail,
    Instruction,
    Leave,
    LookUpItems,
    NotifyItems,
    ResumeState,
    ReturnShare,
    SkipJob,
    StartJobs,
    Submit,
)

#: An embedding that the store loses this often fails its request with 503.
MAX_ITEM_LOSSES = 8
#: Seconds before an item is encoded again after its second loss, twice as long after each further one, up to
#: the longest. A store that fails over, or moves, takes saves for a while that nobody finds afterwards.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
OPTIONS = "mm_processor_kwargs"


class Phase(enum.Enum):
    """Where a request stands."""

    NEW = enum.auto()
    LOOK_UP = enum.auto()
    PLAN = enum.auto()
    SUBMIT = enum.auto()
    RUN = enum.auto()
    #: Planned, at no PD worker: no encoder worker serves what is missing.
    WAIT = enum.auto()
    ENDED = enum.auto()


class Lifecycle:
    """One request's state. `params` gives the request field of each distinct key, in order of its first slot;
    `fetch_seconds` is how long its media took."""

    def __init__(self, params: Mapping[str, str] | None = None, fetch_seconds: float = 0.0) -> None:
        self._params = dict(params or {})
        self.phase = Phase.NEW
        self.attempt = 0
        self.plans: dict[str, ItemPlan] = {}
        self.ready: set[str] = set()
        #: Keys that are neither in the store nor being encoded: a PD worker is expected to hold them.
        self.unencoded: set[str] = set()
        #: Those of them that have been found there.
        self._held: set[str] = set()
        self.timings = Timings(fetch=fetch_seconds)
        self.output_token_ids: list[int] = []
        self.prompt_token_ids: tuple[int, ...] | None = None
        self._placements: tuple[tuple[int, int], ...] = ()
        self._text_chars = 0
        self._losses: dict[str, int] = {}
        #: Keys that the attempt's PD worker has been sent as ready.
        self._announced: frozenset[str] = frozenset()
        #: Keys that the attempt's PD worker has loaded.
        self._loaded: set[str] = set()

    @property
    def ended(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def lacks_items(self) -> bool:
        """Whether it waits at, or for, a PD worker with an item that has to be encoded."""
        return self.phase in (Phase.SUBMIT, Phase.RUN, Phase.WAIT) and self._has_jobs

    @property
    def _has_jobs(self) -> bool:
        return len(self.ready) + len(self.unencoded) < len(self._params)

    def waits_for(self, pool: str) -> bool:
        """Whether it waits for work of an "encoder", or of a "pd" worker, that needs the embedding store."""
        if pool == "encoder":
            return self.phase is not Phase.LOOK_UP and not self.ended and self._has_jobs
        return self.phase in (Phase.SUBMIT, Phase.RUN) and self._loaded < self._params.keys()

    def begin(self) -> list[Instruction]:
        if not self._params:
            return self._submit()
        self.phase = Phase.LOOK_UP
        return [LookUpItems(tuple(self._params))]

    def looked_up(
        self, plans: Mapping[str, ItemPlan], expected: Mapping[str, ItemPlan] | None = None
    ) -> list[Instruction]:
        """The store's answer: the plans of the items that it holds. `expected` are those of further ones that
        a PD worker is expected to hold: they are encoded only if it reports them missing."""
        if self.phase is not Phase.LOOK_UP:
            return []
        self.plans = {**(expected or {}), **plans}
        self.ready.update(plans)
        self.unencoded = self.plans.keys() - plans.keys()
        misses = tuple(key for key in self._params if key not in self.plans)
        if not misses:
            return self._submit()
        self.phase = Phase.PLAN
        return [StartJobs(misses)]

    def planned(self, mm_hash: str, plan: ItemPlan) -> list[Instruction]:
        """An item is preprocessed: its rows and placeholder are known."""
        if self.ended:
            return []
        self.plans.setdefault(mm_hash, plan)
        if self.phase is Phase.PLAN and len(self.plans) == len(self._params):
            return self._submit()
        return []

    def item_ready(
        self, mm_hash: str, plan: ItemPlan, *, encode_seconds: float = 0.0, save_seconds: float = 0.0
    ) -> list[Instruction]:
        """The embedding is in the store."""
        if self.ended:
            return []
        self.ready.add(mm_hash)
        self.unencoded.discard(mm_hash)
        self.timings.encode = max(self.timings.encode, encode_seconds)
        self.timings.save = max(self.timings.save, save_seconds)
        instructions = self.planned(mm_hash, plan)
        if self.phase is Phase.RUN:
            instructions.append(NotifyItems((mm_hash,)))
        elif self.phase is Phase.WAIT and not self.lacks_items:
            return self._submit()
        return instructions

    def encoders_gone(self) -> list[Instruction]:
        """No encoder worker serves what is missing: the request frees its room at the PD worker meanwhile."""
        if not self.lacks_items or self.phase is Phase.WAIT:
            return []
        self.phase = Phase.WAIT
        self.attempt += 1  # events of the old one are ignored from now on
        return [EndAttempt(cancel=True, now=True)]

    def encoders_back(self) -> list[Instruction]:
        """An encoder worker serves the missing items again."""
        return self._submit() if self.phase is Phase.WAIT else []

    def job_failed(self, mm_hash: str, error: RequestError) -> list[Instruction]:
        """The item cannot be encoded at all; the error names the field that holds it, or the option."""
        if self.ended:
            return []
        if error.param is not None and error.param.startswith(OPTIONS):
            return self._fail(error)
        param = self._params.get(mm_hash)
        message = f"{param}: {_without_param(error)}" if param else error.message
        return self._fail(type(error)(message, param=param, retry_after=error.retry_after))

    def accepted(self, attempt: int) -> list[Instruction]:
        """The PD worker has taken the request. Items that became ready meanwhile are announced to it now."""
        if attempt != self.attempt or self.phase is not Phase.SUBMIT:
            return []
        self.phase = Phase.RUN
        late = tuple(sorted(self.ready - self._announced))
        return [NotifyItems(late)] if late else []

    def refused(self, attempt: int, error: RequestError) -> list[Instruction]:
        """The PD worker will not serve the request, and no other one would."""
        if attempt != self.attempt or self.ended:
            return []
        return self._fail(error)

    def admitted(
        self,
        attempt: int,
        started: Started,
        placements: Iterable[tuple[int, int]],
    ) -> list[Instruction]:
        """The PD worker has expanded the prompt and reserved room for all items."""
        if attempt != self.attempt or self.ended:
            return []
        instructions: list[Instruction] = self.accepted(attempt)
        instructions.append(AdmitJobs())
        if self.prompt_token_ids is None:
            self.prompt_token_ids = started.prompt_token_ids
            self._placements = tuple(placements)
            instructions.append(Emit(self._with_frames(started)))
        return instructions

    def _with_frames(self, started: Started) -> Started:
        audio = [plan.grid_thw for plan in self.plans.values() if plan.modality == "audio"]
        return replace(started, frames=audio[0]) if audio else started

    def item_loaded(self, attempt: int, mm_hash: str) -> list[Instruction]:
        """The PD worker has the item's embedding."""
        if attempt != self.attempt or self.ended:
            return []
        self._loaded.add(mm_hash)
        if mm_hash in self.unencoded and mm_hash not in self._held:
            self._held.add(mm_hash)
            return [SkipJob(mm_hash)]
        return [ReturnShare(mm_hash)]

    def item_missing(self, attempt: int, mm_hash: str, damaged_digest: str) -> list[Instruction]:
        """The embedding was evicted or damaged before the worker had it: it is encoded again.

        Ignored for an item that is not ready, whose job is under way: the worker repeats a loss on every new
        stream, and reports it to every request that waits for the item.
        """
        if attempt != self.attempt or self.ended:
            return []
        if mm_hash in self.unencoded:
            self.unencoded.discard(mm_hash)
            return [StartJobs((mm_hash,), expected=True)]
        if mm_hash not in self.ready:
            return []
        self.ready.discard(mm_hash)
        losses = self._losses[mm_hash] = self._losses.get(mm_hash, 0) + 1
        if losses >= MAX_ITEM_LOSSES:
            return self._fail(
                Unavailable("the store keeps losing this item's embedding", retry_after=RETRY_AFTER)
            )
        pause = 0.0 if losses == 1 else min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (losses - 2))
        return [ReturnShare(mm_hash), StartJobs((mm_hash,), True, damaged_digest, pause=pause)]

    def tokens(
        self, attempt: int, position: int, token_ids: list[int], text: str
    ) -> Delta | Sequence[Instruction]:
        """New output as the Delta to send; frames seen before are dropped, a gap ends the attempt.

        Called for every token, so the plain case makes nothing but the Delta, which owns `token_ids` then.
        """
        if attempt != self.attempt or self.phase is Phase.ENDED:
            return ()
        ids = self.output_token_ids
        if position != len(ids):
            return () if position + len(token_ids) <= len(ids) else self.worker_lost(attempt)
        ids += token_ids
        self._text_chars += len(text)
        return Delta(text, token_ids)

    def finished(
        self, attempt: int, reason: str, usage: Usage, spent: PDTimings | None = None
    ) -> list[Instruction]:
        """The PD worker has generated the whole answer; `spent` is what each of its stages took."""
        if attempt != self.attempt or self.ended:
            return []
        if spent is not None:
            timings = self.timings
            timings.queue, timings.load = spent.queue, spent.load
            timings.prefill, timings.decode = spent.prefill, spent.decode
        done = Done(FinishReason(reason), usage, self.timings)
        self.phase = Phase.ENDED
        return [EndAttempt(cancel=False), Leave(), Emit(done)]

    def worker_lost(self, attempt: int, *, cancel: bool = True) -> list[Instruction]:
        """The PD worker is gone, has stalled or does not know the request, which goes on elsewhere."""
        if attempt != self.attempt or self.phase not in (Phase.SUBMIT, Phase.RUN):
            return []
        return [EndAttempt(cancel=cancel), *self._submit()]

    def client_gone(self) -> list[Instruction]:
        """The client has closed the stream."""
        return [] if self.ended else self._end()

    def fail(self, error: RequestError) -> list[Instruction]:
        """The proxy ends the request."""
        return [] if self.ended else self._fail(error)

    def deadline(self, *, queued: bool = False, encoders: bool = True) -> list[Instruction]:
        """The request's time is over: 503 when something was not there at all, else 504.

        `queued`: it waits in the proxy for a PD worker; `encoders`: an encoder worker serves.
        """
        if lacking := self._lacking(queued, encoders):
            message = f"no {lacking} could be reached in time"
            return self.fail(Unavailable(message, retry_after=RETRY_AFTER))
        return self.fail(DeadlineExceeded("the request took longer than its timeout"))

    def _lacking(self, queued: bool, encoders: bool) -> str:
        """What the request waits for that is not there."""
        if self.phase is Phase.SUBMIT and queued:
            return "PD worker"
        waits = self.phase in (Phase.PLAN, Phase.WAIT) or (self.phase is Phase.RUN and self._has_jobs)
        return "encoder worker" if waits and not encoders else ""

    def _submit(self) -> list[Instruction]:
        self.phase = Phase.SUBMIT
        self.attempt += 1
        self._loaded.clear()
        self._announced = frozenset(self.ready)
        resume = None
        if self.prompt_token_ids is not None:
            resume = ResumeState(
                self.prompt_token_ids, self._placements, tuple(self.output_token_ids), self._text_chars
            )
        return [Submit(self.attempt, resume, self._announced, frozenset(self.unencoded))]

    def _fail(self, error: RequestError) -> list[Instruction]:
        return [*self._end(), Fail(error)]

    def _end(self) -> list[Instruction]:
        submitted = self.phase in (Phase.SUBMIT, Phase.RUN)
        self.phase = Phase.ENDED
        return [EndAttempt(cancel=submitted), Leave()] if submitted else [Leave()]


def _without_param(error: RequestError) -> str:
    """The message without the worker's own name for the item."""
    return error.message.removeprefix(f"{error.param}: ") if error.param else error.message

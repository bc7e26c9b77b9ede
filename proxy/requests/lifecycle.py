"""State machine of one request, without I/O: events in, instructions out.

begin -> (look up -> plan what is missing) -> submit -> admitted -> items ready, loaded -> tokens -> finished
                                                ^--- attempt + 1 from what has been received ---|

A prefill worker offers its request to a decode worker: that one gets the next attempt, the successor, while
the present one goes on. With its first tokens it takes over.

While no encoder worker serves what is missing, the request waits without an attempt. Its attributes change
only through its events; everything else reads them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

from triptych.base.delta import Delta
from triptych.base.errors import RETRY_AFTER, DeadlineExceeded, InternalError, RequestError, Unavailable
from triptych.base.types import FinishReason, Usage
from triptych.protos.convert import error_from_proto
from triptych.protos.pd_pb2 import Finished, ItemPlacement, Resume, Tokens
from triptych.proxy.call.chat import Done, Timings
from triptych.proxy.events import (
    Accepted,
    AttemptEvent,
    ClientLeft,
    DeadlinePassed,
    EncodersBack,
    EncodersGone,
    Fetched,
    FirstToken,
    JobEvent,
    LookedUp,
    Refused,
    RequestEvent,
    RequestFailed,
    SuccessorBegun,
    SuccessorSent,
    WorkerEvent,
    lost,
    served,
    told,
)
from triptych.proxy.requests.instructions import (
    Emit,
    EndAttempt,
    Fail,
    Instruction,
    Leave,
    LookUpItems,
    NotifyItems,
    StartJobs,
    Submit,
    TakeOver,
    TellJobs,
)
from triptych.proxy.requests.request_item import EmbeddingStatus, RequestItem
from triptych.proxy.requests.successor import Repeated, Successor

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
    #: At no PD worker, its items planned: no encoder worker serves what is missing.
    WAIT = enum.auto()
    ENDED = enum.auto()


class Lifecycle:
    """One request's state, which `deliver` and `tokens` alone change."""

    def __init__(self) -> None:
        self.phase = Phase.NEW
        self.attempt = 0
        self._successor = Successor()
        #: The attempt has taken over from a prefill worker's.
        self.took_over = False
        #: Of one that has, and is behind the output.
        self._repeated: Repeated | None = None
        #: Its distinct items by key, in order of their first slots.
        self.items: dict[str, RequestItem] = {}
        self.timings = Timings()
        self.output_token_ids: list[int] = []
        self.prompt_token_ids: tuple[int, ...] | None = None
        self._placements: Iterable[ItemPlacement] = ()
        #: Of the prompt, what its prefill worker had in its cache: decode workers find all of it.
        self._cached_tokens: int | None = None
        self._text_chars = 0

    @property
    def ended(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def successor(self) -> int | None:
        """The attempt of the decode worker that is to take over; None where none is."""
        return self._successor.attempt

    @property
    def lacks_items(self) -> bool:
        """Whether it waits at, or for, a PD worker with an item that has to be encoded."""
        return self.phase in (Phase.SUBMIT, Phase.RUN, Phase.WAIT) and self._has_jobs

    @property
    def awaits_prefill(self) -> bool:
        """Whether it waits for a PD worker's room or for its prompt to be computed, and for no encoder."""
        admitted, begun = self.prompt_token_ids is not None, bool(self.output_token_ids)
        return self.phase in (Phase.SUBMIT, Phase.RUN) and not begun and not (admitted and self._has_jobs)

    @property
    def prompt_tokens(self) -> int | None:
        """Of its prompt; until a PD worker has told them those of its items, or None where it has none."""
        if self.prompt_token_ids is not None:
            return len(self.prompt_token_ids)
        return self.media_tokens or None

    @property
    def media_tokens(self) -> int:
        """Placeholder tokens of the distinct items whose plans are known."""
        return sum(item.plan.length for item in self.items.values() if item.plan is not None)

    @property
    def resume(self) -> Resume | None:
        """What its next attempt goes on from; None of a request that no PD worker has admitted."""
        if self.prompt_token_ids is None:
            return None
        return Resume(
            prompt_token_ids=self.prompt_token_ids,
            placements=self._placements,
            output_token_ids=self.output_token_ids,
            text_sent_chars=self._text_chars,
            cached_tokens=self._cached_tokens,
        )

    @property
    def _has_jobs(self) -> bool:
        return any(item.needs_encoder for item in self.items.values())

    @property
    def items_ready(self) -> int:
        """Items that no encoder is needed for any more."""
        return sum(not item.needs_encoder for item in self.items.values())

    def waits_for(self, pool: str) -> bool:
        """Whether it waits for work of an "encoder", or of a "pd" worker, that needs the embedding store."""
        if pool == "encoder":
            return self.phase is not Phase.LOOK_UP and not self.ended and self._has_jobs
        loads = any(not item.loaded for item in self.items.values())
        return self.phase in (Phase.SUBMIT, Phase.RUN) and loads

    def deliver(self, event: RequestEvent) -> Sequence[Instruction]:
        """What the event has the dispatcher do; nothing after the end, or of an attempt that is over."""
        if self.ended:
            return ()
        if isinstance(event, AttemptEvent):
            if event.attempt != self.attempt:
                return self._successor.observe(event) if event.attempt == self.successor else ()
            return self._at_worker(event)
        match event:
            case Fetched():
                return self._begin(event)
            case EncodersGone():
                return self._free_worker()
            case EncodersBack():
                return self._submit() if self.phase is Phase.WAIT else ()
            case RequestFailed():
                return self._fail(event.error)
            case ClientLeft():
                return self._end()
            case DeadlinePassed():
                return self._deadline(event)
            case LookedUp():
                return self._looked_up(event)
            case JobEvent():
                return self._of_job(self.items[event.mm_hash], event)
            case SuccessorSent() | SuccessorBegun():
                return self._hand_over(event) if event.attempt == self.successor else ()
            case FirstToken():
                return ()

    def _of_job(self, item: RequestItem, event: JobEvent) -> Sequence[Instruction]:
        """An event of the item's encoder job."""
        match told(event):
            case "waits":
                item.origin = event.waits.origin
            case "failed" if not event.failed.retryable:
                return self._job_failed(item, error_from_proto(event.failed.error))
            case "planned" | "ready" as kind:
                if item.plan is None:
                    item.slot.plan.CopyFrom(event.planned if kind == "planned" else event.ready.plan)
                if kind == "ready":
                    item.ready(event.ready, (event.store_epoch, event.clock_jumps))
                    self.timings.encode = max(self.timings.encode, event.ready.encode_seconds)
                    self.timings.save = max(self.timings.save, event.ready.save_seconds)
                if self.phase is Phase.PLAN and all(each.plan is not None for each in self.items.values()):
                    return self._submit()
                if kind == "ready" and self.phase is Phase.RUN:
                    return [NotifyItems((item.mm_hash,))]
                if kind == "ready" and self.phase is Phase.WAIT and not self.lacks_items:
                    return self._submit()
        return ()

    def _at_worker(self, event: AttemptEvent) -> Sequence[Instruction]:
        """An event of the attempt at its PD worker."""
        if isinstance(event, Accepted):
            return self._accepted()
        if isinstance(event, Refused):
            return self._fail(event.error)
        match told(event):
            case "admitted":
                return self._admitted(event)
            case "item_loaded":
                return self._loaded(self.items[event.item_loaded.mm_hash], event)
            case "item_missing":
                return self._missing(self.items[event.item_missing.mm_hash], event)
            case "finished":
                return self._finished(event.finished) if served(event) else self._given_up(event.finished)
            case "lost":
                return self._worker_lost()
            case "tokens" if event.tokens.offered and self.phase is Phase.RUN:
                return self._offered(event.tokens)
        return ()

    def _offered(self, offer: Tokens) -> Sequence[Instruction]:
        if offer.HasField("cached_tokens"):
            self._cached_tokens = offer.cached_tokens
        return self._successor.offered(offer.kv if offer.HasField("kv") else None)

    def _hand_over(self, event: SuccessorSent | SuccessorBegun) -> Sequence[Instruction]:
        received = len(self.output_token_ids)
        if isinstance(event, SuccessorSent):
            self._successor.sent(received, self._text_chars)
            return ()
        return self._successor.begun(received - event.position) or self._take_over(event.attempt)

    def _take_over(self, attempt: int, *, lost: bool = False) -> list[Instruction]:
        """The successor's attempt is the request's, and goes on from what it was sent."""
        successor, repeated = self._successor, self._successor.repeated
        behind = repeated is not None and repeated.position < len(self.output_token_ids)
        self.attempt, self.took_over, self._repeated = attempt, True, repeated if behind else None
        self.phase = Phase.RUN if successor.taken else Phase.SUBMIT
        successor.clear()
        return [TakeOver(attempt, lost=lost)]

    def _begin_attempt(self) -> None:
        """A further attempt, of which there is no output yet; events of others are ignored from now on."""
        self._successor.clear()
        self.took_over, self._repeated = False, None
        self.attempt = self._successor.draw()

    def tokens(
        self, attempt: int, position: int, token_ids: list[int], text: str
    ) -> Delta | WorkerEvent | SuccessorBegun | None:
        """New output as the Delta to send; frames seen before are dropped. A gap: the attempt is lost, which
        is still to be delivered, as is that the successor has begun, whose tokens are to come again then.

        Called for every token, so the plain case makes nothing but the Delta, which owns `token_ids` then.
        """
        if attempt != self.attempt or self.phase is Phase.ENDED:
            begins = attempt == self.successor and self.phase is not Phase.ENDED
            return SuccessorBegun(attempt, position) if begins else None
        ids = self.output_token_ids
        if position != len(ids):
            if self._repeated is not None:
                return self._repeat(self._repeated, position, token_ids, text)
            return None if position + len(token_ids) <= len(ids) else lost(attempt)
        ids += token_ids
        self._text_chars += len(text)
        return Delta(text, token_ids)

    def _repeat(
        self, repeated: Repeated, position: int, token_ids: list[int], text: str
    ) -> Delta | WorkerEvent | None:
        """What is new in a frame of an attempt that has taken over and puts out again what is known."""
        ids = self.output_token_ids
        new = repeated.new_part(position, token_ids, text, ids, self._text_chars)
        if new is None or repeated.position >= len(ids):
            self._repeated = None
        if new is None:
            return lost(self.attempt)
        ids += new[0]
        self._text_chars += len(new[1])
        return Delta(new[1], new[0]) if new[0] or new[1] else None

    def _begin(self, event: Fetched) -> Sequence[Instruction]:
        self.items = {key: RequestItem(key, param) for key, param in event.params.items()}
        self.timings.fetch = event.seconds
        if not self.items:
            return self._submit()
        self.phase = Phase.LOOK_UP
        return [LookUpItems(tuple(self.items))]

    def _looked_up(self, event: LookedUp) -> Sequence[Instruction]:
        if self.phase is not Phase.LOOK_UP:
            return ()
        for key, item in self.items.items():
            item.look_up(event.plans.get(key), event.expected.get(key), event.epoch)
        misses = tuple(key for key, item in self.items.items() if item.needs_encoder)
        if not misses:
            return self._submit()
        self.phase = Phase.PLAN
        return [StartJobs(misses)]

    def _free_worker(self) -> Sequence[Instruction]:
        """Nobody encodes what is missing: the request frees its memory at the PD worker meanwhile."""
        if not self.lacks_items or self.phase is Phase.WAIT:
            return ()
        self.phase = Phase.WAIT
        self._begin_attempt()
        return [EndAttempt(cancel=True, now=True)]

    def _job_failed(self, item: RequestItem, error: RequestError) -> list[Instruction]:
        """The error names the field that holds the item, or the option."""
        if error.param is not None and error.param.startswith(OPTIONS):
            return self._fail(error)
        param = item.param
        message = error.message
        if param:  # in place of the worker's own name for the item
            message = f"{param}: {message.removeprefix(f'{error.param}: ') if error.param else message}"
        return self._fail(type(error)(message, param=param, retry_after=error.retry_after))

    def _accepted(self) -> list[Instruction]:
        """Items that became ready meanwhile are announced to the worker now."""
        if self.phase is not Phase.SUBMIT:
            return []
        self.phase = Phase.RUN
        stored = (item for item in self.items.values() if item.status is EmbeddingStatus.STORED)
        late = tuple(sorted(item.mm_hash for item in stored if not item.announced))
        return [NotifyItems(late)] if late else []

    def _admitted(self, event: WorkerEvent) -> list[Instruction]:
        instructions = self._accepted()
        instructions.append(TellJobs(event))
        if self.prompt_token_ids is None:
            prompt = event.admitted
            self.prompt_token_ids = tuple(prompt.prompt_token_ids)
            self._placements = prompt.placements
            plans = [item.plan for item in self.items.values()]
            sounds = [plan.grid_thw for plan in plans if plan is not None and plan.modality == "audio"]
            prompt.frames[:] = sounds[0] if sounds else ()
            instructions.append(Emit(prompt))
        return instructions

    def _loaded(self, item: RequestItem, event: WorkerEvent) -> list[Instruction]:
        item.loaded = True
        if item.status is EmbeddingStatus.EXPECTED:
            item.status = EmbeddingStatus.HELD
            return [TellJobs(event, held=True)]
        return [TellJobs(event)]

    def _missing(self, item: RequestItem, event: WorkerEvent) -> Sequence[Instruction]:
        """The item is encoded again, or for the first time where it was expected to be there.

        Ignored while its job is under way: the worker repeats a loss on every new stream, and reports it to
        every request that waits for the item.
        """
        before, item.status = item.status, EmbeddingStatus.PENDING
        item.slot.ClearField("source")
        key = item.mm_hash
        if before in (EmbeddingStatus.EXPECTED, EmbeddingStatus.HELD):
            return [StartJobs((key,), expected=True)]
        if before is EmbeddingStatus.PENDING:
            return ()
        item.losses += 1
        if item.losses >= MAX_ITEM_LOSSES:
            return self._fail(
                Unavailable("the store keeps losing this item's embedding", retry_after=RETRY_AFTER)
            )
        pause = 0.0 if item.losses == 1 else min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (item.losses - 2))
        return [TellJobs(event), StartJobs((key,), True, event.item_missing.damaged_digest, pause=pause)]

    def _finished(self, end: Finished) -> Sequence[Instruction]:
        if self.took_over and end.completion_tokens < len(self.output_token_ids):
            return self._worker_lost()  # another output than the one that it repeats
        if self._cached_tokens is not None:
            end.cached_tokens = self._cached_tokens  # workers of an earlier release tell their own
        timings = self.timings
        timings.queue, timings.load = end.queue_seconds, end.load_seconds
        timings.prefill, timings.decode = end.prefill_seconds, end.decode_seconds
        usage = Usage(end.prompt_tokens, end.completion_tokens, end.cached_tokens)
        reason, stop = FinishReason(end.reason), end.stop_sequence
        self.phase = Phase.ENDED
        done = Done(reason, usage, timings, stop_sequence=stop, pooled=end.pooled)
        return [EndAttempt(cancel=False), Leave(), Emit(done)]

    def _given_up(self, end: Finished) -> Sequence[Instruction]:
        """The worker has ended the request without its answer, or hands it over: it goes on elsewhere."""
        error: RequestError = InternalError("the PD worker aborted the request")
        if end.HasField("error"):
            error = error_from_proto(end.error)
        if end.reason == "abort" or isinstance(error, Unavailable):
            return self._worker_lost(back_off=True)
        return self._fail(error)

    def _worker_lost(self, *, back_off: bool = False) -> Sequence[Instruction]:
        """The request goes on elsewhere."""
        if self.phase not in (Phase.SUBMIT, Phase.RUN):
            return ()
        if self.successor is not None and self._successor.repeated is not None:
            return self._take_over(self.successor, lost=True)
        return [EndAttempt(cancel=True, back_off=back_off), *self._submit()]

    def _deadline(self, event: DeadlinePassed) -> list[Instruction]:
        """503 when what it waits for was not there at all, else 504."""
        waits = self.phase in (Phase.PLAN, Phase.WAIT) or (self.phase is Phase.RUN and self._has_jobs)
        lacking = "encoder worker" if waits and not event.encoders else ""
        if self.phase is Phase.SUBMIT and event.queued:
            lacking = "PD worker"
        if not lacking:
            return self._fail(DeadlineExceeded("the request took longer than its timeout"))
        return self._fail(Unavailable(f"no {lacking} could be reached in time", retry_after=RETRY_AFTER))

    def _submit(self) -> list[Instruction]:
        self.phase = Phase.SUBMIT
        self._begin_attempt()
        for item in self.items.values():
            item.begin_attempt()
        return [Submit(self.attempt, resumes=self.prompt_token_ids is not None)]

    def _fail(self, error: RequestError) -> list[Instruction]:
        return [*self._end(), Fail(error)]

    def _end(self) -> list[Instruction]:
        submitted = self.phase in (Phase.SUBMIT, Phase.RUN)
        self.phase = Phase.ENDED
        return [EndAttempt(cancel=submitted), Leave()] if submitted else [Leave()]

"""One item's job in this worker, and the streams that wait for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from triptych.ec_connector.base import EncoderOutput
from triptych.encoder_worker.media.budget import MediaRoom
from triptych.errors import RequestError
from triptych.models.base import PreparedItem
from triptych.types import ItemPlan


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What one stream asks for; see `EncodeJob` of the protocol. `timeout` is in seconds."""

    job_id: str
    request_id: str
    mm_hash: str
    namespace: str
    modality: str
    processor_options: Mapping[str, Any]
    salt: str
    media_bytes: int
    timeout: float
    failed_lease_token: str = ""
    damaged_digest: str = ""
    re_encode: bool = False
    label: str = ""


@dataclass(slots=True)
class JobTimings:
    """Seconds of a job's phases."""

    queue: float = 0.0
    preprocess: float = 0.0
    encode: float = 0.0
    save: float = 0.0


@dataclass(frozen=True, slots=True)
class Planned:
    """Sizes of the item; no embedding exists yet."""

    plan: ItemPlan


@dataclass(frozen=True, slots=True)
class Ready:
    """The embedding is in the store. Ends the stream."""

    plan: ItemPlan
    already_stored: bool
    timings: JobTimings


@dataclass(frozen=True, slots=True)
class MediaWanted:
    """The prepared pixels are gone: send all media frames again."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The job is over without an embedding. Ends the stream."""

    error: RequestError
    retryable: bool
    owner_address: str = ""
    owner_token: str = ""


@dataclass(frozen=True, slots=True)
class Waits:
    """The tower works on others; the item's turn comes."""


JobEvent = Planned | Ready | MediaWanted | Waits | Failed


@dataclass(eq=False, slots=True)
class Waiter:
    """One stream's part in a job. `send` takes events in the event loop's thread and never blocks."""

    spec: JobSpec
    deadline: float
    send: Callable[[JobEvent], None]
    told_plan: bool = False
    admitted: bool = False
    #: The media were asked for again and have not begun to come.
    media_wanted: bool = False
    #: The stream's sender has said its last word.
    closed: bool = False
    ended: bool = False

    def want_media(self) -> None:
        self.media_wanted = True
        self.send(MediaWanted())

    def tell_plan(self, plan: ItemPlan) -> None:
        if not self.told_plan and not self.ended:
            self.told_plan = True
            self.send(Planned(plan))

    def end(self, event: Ready | Failed) -> None:
        if not self.ended:
            self.ended = True
            self.send(event)


@dataclass(frozen=True, slots=True)
class VerifiedMedia:
    """Media bytes whose hash is the job's key, with the options that the key was made with."""

    data: bytes
    options: Mapping[str, Any]


@dataclass(eq=False, slots=True)
class ItemJob:
    """One mm_hash in this worker, from its first stream to its end."""

    mm_hash: str
    started: float
    waiters: list[Waiter] = field(default_factory=list)
    plan: ItemPlan | None = None
    #: Verified media that wait for preprocessing, and their room in the budget.
    media: VerifiedMedia | None = None
    media_room: MediaRoom | None = None
    prepared: PreparedItem | None = None
    #: The tower's rows on the host, from the encode on, or kept from an earlier job.
    output: EncoderOutput | None = None
    looked_up: bool = False
    in_tower: bool = False
    saving: bool = False
    save_started: float = 0.0
    save_error: str = ""
    #: Who was asked to send the media again.
    asked: Waiter | None = None
    runnable_since: float = 0.0
    timings: JobTimings = field(default_factory=JobTimings)

    @property
    def deadline(self) -> float:
        """When the last waiter gives up, on the monotonic clock; the job's start when there is none."""
        return max((w.deadline for w in self.waiters), default=self.started)

    @property
    def damaged_digest(self) -> str:
        """Digest of the damaged value that some waiter saw."""
        return next((w.spec.damaged_digest for w in self.waiters if w.spec.damaged_digest), "")

    @property
    def failed_lease_token(self) -> str:
        """Token of a lease whose owner failed some waiter."""
        return next((w.spec.failed_lease_token for w in self.waiters if w.spec.failed_lease_token), "")

    def take_media(self) -> tuple[VerifiedMedia | None, MediaRoom | None]:
        """The media, which are the caller's from now on, with their room."""
        media, room = self.media, self.media_room
        self.media = self.media_room = None
        return media, room

    def drop_media(self) -> None:
        """Media that are not needed any more."""
        _, room = self.take_media()
        if room is not None:
            room.release()

    def learn_plan(self, plan: ItemPlan) -> None:
        """Keeps the plan and tells it to every waiter."""
        self.plan = plan
        for waiter in list(self.waiters):
            waiter.tell_plan(plan)

    def end(self, event: Ready | Failed) -> None:
        """Answers every waiter, whether the event is an embedding, a permanent or a passing error."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if isinstance(event, Ready):
                waiter.tell_plan(event.plan)
            waiter.end(event)

"""The job of one item in an encoder worker, the streams that wait for it, and their spans."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from triptych.base.log import log_fields
from triptych.base.tracing import attributes as names
from triptych.base.tracing.context import Producers, SpanContext, hex_trace_id, to_bytes
from triptych.base.tracing.tracer import Span, SpanKind, Tracer
from triptych.base.types import ItemPlan
from triptych.ec_connector.base import EncoderOutput
from triptych.encoder_worker.engine import TowerItem
from triptych.encoder_worker.job_spec import JobSpec
from triptych.encoder_worker.media.budget import MediaReservation
from triptych.encoder_worker.media.preparer import VerifiedMedia
from triptych.encoder_worker.media.shared_clips import ClipHold
from triptych.encoder_worker.media.work import DecodeWork
from triptych.encoder_worker.scheduler import EncoderItem
from triptych.models.base import PreparedItem
from triptych.protos.convert import plan_to_proto
from triptych.protos.encoder_pb2 import EncodeEvent, ItemReady
from triptych.protos.job_events import NEED_MEDIA, WAITS


class StreamTrace:
    """The span of one proxy's stream, a child of that proxy's span of the item."""

    def __init__(self, tracer: Tracer, parent: SpanContext | None) -> None:
        self.tracer = tracer
        self._span = tracer.start("encoder job", parent, kind=SpanKind.SERVER)
        self.context = self._span.get_span_context()
        self.recording = self._span.is_recording()

    @property
    def trace_id(self) -> str:
        """For logs; empty where the trace is not recorded."""
        return hex_trace_id(self.context) if self.recording else ""

    def end(self, waiter: Waiter, outcome: str, *, already_stored: bool = False) -> None:
        """The stream has had its last event: `outcome` is "" or the error's code."""
        if not self.recording:
            return
        job, spec = waiter.job, waiter.spec
        owner = job.trace
        shared = owner is not None and owner.context != self.context
        if shared and owner is not None and owner.tower is not None and not already_stored:
            self._span.add_link(owner.tower.get_span_context())
        plan = job.plan
        sizes = {} if plan is None else {names.ROWS: plan.rows, names.BYTES: plan.nbytes}
        failed = {names.ERROR_TYPE: outcome} if outcome else {}
        self._span.set_attributes(
            {
                **names.item(spec.mm_hash),
                names.MODALITY: spec.modality,
                names.RE_ENCODE: spec.re_encode,
                names.SHARED: shared,
                names.STORED: already_stored,
                **sizes,
                **failed,
            }
        )
        self.tracer.end(self._span, error=outcome)


class JobTrace:
    """The stages of one item's job, under the first stream whose trace is recorded."""

    def __init__(self, owner: StreamTrace) -> None:
        self.context = owner.context
        self.trace_id = owner.trace_id
        #: The span of the item in the tower, which is the embedding's producer.
        self.tower: Span | None = None
        self._tracer = owner.tracer

    def encoding(self, job: EncodeJob, producers: Producers) -> None:
        """The item goes into the tower: what is saved now, this job has computed."""
        if job.output is None:
            self.tower = self._tracer.start("tower", self.context, names.item(job.mm_hash))
            producers.note(job.mm_hash, to_bytes(self.tower.get_span_context()))

    def end(self, job: EncodeJob) -> None:
        """The job has ended: hands in the stages that it went through."""
        spent, tracer = job.ready, self._tracer
        tracer.stage("preprocess", self.context, job.prepare_started, spent.preprocess_seconds)
        tracer.stage("wait for tower", self.context, job.queued_since, spent.queue_seconds)
        if self.tower is not None and job.encoded_at and spent.work_seconds > 0.0:
            tracer.end(self.tower, job.encoded_at)
        tracer.stage("save", self.context, job.save_started, spent.save_seconds)


@dataclass(eq=False, slots=True)
class Waiter:
    """One stream that waits for a job, from join to its last event. `send` must not block."""

    spec: JobSpec
    job: EncodeJob
    deadline: float
    send: Callable[[EncodeEvent], None]
    plan_sent: bool = False
    permitted: bool = False
    #: The media were asked for again and no frame has arrived yet.
    media_needed: bool = False
    #: The client has half-closed the stream.
    closed: bool = False
    ended: bool = False
    trace: StreamTrace | None = None

    @property
    def log_extra(self) -> dict[str, object]:
        """The fields of log records about the stream."""
        spec, trace = self.spec, self.trace
        return log_fields(
            request_id=spec.request_id[:64],
            label=spec.label[:128],
            mm_hash=spec.mm_hash,
            trace_id="" if trace is None else trace.trace_id,
        )

    def want_media(self) -> None:
        self.media_needed = True
        self.send(NEED_MEDIA)

    def send_plan(self) -> None:
        if not self.plan_sent and not self.ended:
            self.plan_sent = True
            self.send(EncodeEvent(planned=self.job.ready.plan))

    def end(self, event: EncodeEvent) -> None:
        """Sends the last event, `ready` or `failed`."""
        if not self.ended:
            self.ended = True
            self.send(event)
            self.end_trace(event)

    def end_trace(self, event: EncodeEvent | None) -> None:
        """Hands in the stream's span, once; without an event the proxy has left."""
        trace, self.trace = self.trace, None
        if trace is None:
            return
        if event is None:
            trace.end(self, "cancelled")
        else:
            trace.end(self, event.failed.error.code, already_stored=event.ready.already_stored)


@dataclass(eq=False, slots=True, kw_only=True)
class EncodeJob(EncoderItem):
    """The job of one mm_hash, from the first stream that asks for it to its end."""

    mm_hash: str
    started: float
    waiters: list[Waiter] = field(default_factory=list)
    plan: ItemPlan | None = None
    #: Verified media that wait for preprocessing, and their room in the budget.
    media: VerifiedMedia | None = None
    media_reservation: MediaReservation | None = None
    #: What it holds of the decoder that it shares with other parts of its video.
    clip: ClipHold | None = None
    #: The decode under way.
    decode: DecodeWork | None = None
    #: The stream that was asked to send the media again.
    media_sender: Waiter | None = None
    prepared: PreparedItem | None = None
    #: The encoder output in host memory, of this job or kept from an earlier one.
    output: EncoderOutput | None = None
    queued_since: float = 0.0
    prepare_started: float = 0.0
    encoded_at: float = 0.0
    save_started: float = 0.0
    save_error: str = ""
    #: Its last event in the making: the plan, the seconds of its phases, and where PD workers can read the
    #: output while its save goes on.
    ready: ItemReady = field(default_factory=ItemReady)
    #: Where a stream's trace is recorded.
    trace: JobTrace | None = None
    ended: bool = False

    @property
    def deadline(self) -> float:
        """The latest deadline of its waiters, on the monotonic clock; the job's start without waiters."""
        return max((w.deadline for w in self.waiters), default=self.started)

    @property
    def permitted(self) -> bool:
        """Some stream has permission to use the tower."""
        return any(w.permitted for w in self.waiters)

    @property
    def damaged_digest(self) -> str:
        """Digest of the damaged value in the store that a waiter reported."""
        return next((w.spec.damaged_digest for w in self.waiters if w.spec.damaged_digest), "")

    @property
    def failed_lease_token(self) -> str:
        """Token of a lease whose owner failed the item, as a waiter reported."""
        return next((w.spec.failed_lease_token for w in self.waiters if w.spec.failed_lease_token), "")

    @property
    def trace_id(self) -> str:
        """The trace that its stages are recorded in; empty where no stream's is recorded."""
        return "" if self.trace is None else self.trace.trace_id

    @property
    def log_extra(self) -> dict[str, object]:
        """The fields of log records about the item."""
        return log_fields(mm_hash=self.mm_hash, trace_id=self.trace_id)

    def pop_media(self) -> tuple[VerifiedMedia | None, MediaReservation | None]:
        """Hands the media and their room to the caller."""
        media, reservation = self.media, self.media_reservation
        self.media = self.media_reservation = None
        return media, reservation

    def drop_media(self) -> None:
        """Releases the media."""
        _, reservation = self.pop_media()
        if reservation is not None:
            reservation.release()

    def end_decode(self) -> None:
        """Nobody waits: the decode under way ends, with its process unless others share it."""
        if self.decode is not None:
            self.decode.cancel()
        self.drop_clip()

    def drop_clip(self) -> None:
        clip, self.clip = self.clip, None
        if clip is not None:
            clip.release()

    def drop_pixels(self) -> None:
        EncoderItem.drop_pixels(self)
        self.prepared = self.output = None

    def set_plan(self, plan: ItemPlan) -> None:
        """Keeps the plan and sends it to every waiter."""
        self.plan = plan
        self.ready.plan.CopyFrom(plan_to_proto(plan))
        for waiter in list(self.waiters):
            waiter.send_plan()

    def tower_item(self) -> TowerItem:
        """The engine's view of a planned job."""
        assert self.plan is not None
        return TowerItem(
            self.plan,
            self.prepared,
            self.output,
            self.damaged_digest,
            lambda: bool(self.waiters),
            self.trace_id,
            self.tenant,
        )

    def send_waits(self) -> None:
        """Sends `waits` to the streams that have permission, or all while there is no plan."""
        for waiter in self.waiters:
            if (waiter.permitted or self.plan is None) and not waiter.ended:
                waiter.send(WAITS)

    def answer_direct(self) -> None:
        """Ends the streams whose PD workers can read the output already; the others wait for the save."""
        if self.ready.HasField("source") and self.plan is not None:
            ready = [waiter for waiter in self.waiters if waiter.spec.direct and waiter.permitted]
            self.waiters = [waiter for waiter in self.waiters if waiter not in ready]
            _end_all(ready, EncodeEvent(ready=self.ready))

    def end(self, event: EncodeEvent) -> None:
        """Sends the last event to every waiter."""
        waiters, self.waiters = self.waiters, []
        _end_all(waiters, event)


def _end_all(waiters: Iterable[Waiter], event: EncodeEvent) -> None:
    for waiter in waiters:
        if event.HasField("ready"):
            waiter.send_plan()
        waiter.end(event)

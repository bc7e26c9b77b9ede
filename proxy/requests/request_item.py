"""One item of a request: what is known of its embedding, and what a PD worker is told of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from triptych.base.tracing.tracer import Span
from triptych.base.types import EmbeddingSource, ItemPlan
from triptych.protos.common_pb2 import ItemPlan as PlanMessage
from triptych.protos.convert import plan_to_proto, source_from_proto
from triptych.protos.encoder_pb2 import ItemReady
from triptych.protos.pd_pb2 import (
    ITEM_STATE_PENDING,
    ITEM_STATE_READY,
    ITEM_STATE_UNENCODED,
    ItemSlot,
    ItemState,
)
from triptych.proxy.events import StoreEpoch


class EmbeddingStatus(enum.Enum):
    """What a request knows of an item's embedding."""

    #: Nobody has it: it has to be encoded.
    PENDING = enum.auto()
    #: Not stored and not being encoded: a PD worker is expected to hold it.
    EXPECTED = enum.auto()
    #: It was expected, and a PD worker has it.
    HELD = enum.auto()
    #: It is in the store.
    STORED = enum.auto()


@dataclass(eq=False, slots=True)
class RequestItem:
    """One item of a request, however many slots it has; `param` is the request field of the first one."""

    mm_hash: str
    param: str
    status: EmbeddingStatus = EmbeddingStatus.PENDING
    #: What a PD worker is told of it: its plan, once a look-up or an encoder worker has said it, and where it
    #: can be read besides the store.
    slot: ItemSlot = field(default_factory=ItemSlot)
    #: Times that the store has lost it to this request.
    losses: int = 0
    #: The attempt's PD worker knows that it is stored.
    announced: bool = False
    #: The attempt's PD worker has it.
    loaded: bool = False
    #: Where its embedding comes from: "store", "pd", "encoded" or "joined", which is another request's job.
    origin: str = ""
    #: The store's epoch when the item was last known to be there.
    stored_in: StoreEpoch | None = None
    #: The span of its encoder job, where the request is traced.
    span: Span | None = None

    @property
    def plan(self) -> PlanMessage | None:
        """Its rows and placeholder, where they are known."""
        return self.slot.plan if self.slot.HasField("plan") else None

    @property
    def source(self) -> EmbeddingSource | None:
        """Where it can be read besides the store."""
        return source_from_proto(self.slot.source)

    @property
    def state(self) -> ItemState:
        """The message that names its embedding to a PD worker."""
        if self.status is EmbeddingStatus.STORED:
            return ITEM_STATE_READY
        return ITEM_STATE_UNENCODED if self.expected else ITEM_STATE_PENDING

    @property
    def needs_encoder(self) -> bool:
        return self.status is EmbeddingStatus.PENDING

    @property
    def expected(self) -> bool:
        """Whether a PD worker is expected, or known, to hold it though it is not stored."""
        return self.status in (EmbeddingStatus.EXPECTED, EmbeddingStatus.HELD)

    def look_up(self, stored: ItemPlan | None, expected: ItemPlan | None, epoch: StoreEpoch) -> None:
        """The store's answer, and what a PD worker is expected to hold."""
        if stored is not None:
            self.status, self.origin, self.stored_in = EmbeddingStatus.STORED, "store", epoch
        elif expected is not None:
            self.status, self.origin = EmbeddingStatus.EXPECTED, "pd"
        if (plan := stored or expected) is not None:
            self.slot.plan.CopyFrom(plan_to_proto(plan))

    def ready(self, end: ItemReady, epoch: StoreEpoch) -> None:
        """It is in the store, or can be read at its source."""
        self.status, self.stored_in = EmbeddingStatus.STORED, epoch
        self.slot.ClearField("source")
        if source_from_proto(end.source) is not None:
            self.slot.source.CopyFrom(end.source)
        if end.already_stored:
            self.origin = "store"

    def begin_attempt(self) -> None:
        """The next PD worker is sent the request."""
        self.loaded, self.announced = False, self.status is EmbeddingStatus.STORED

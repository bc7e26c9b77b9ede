"""Item of a request: where its embedding is, and what the request has to do for it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from triptych.base.tracing.tracer import Span
from triptych.base.types import ItemPlan
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
    #: Its rows and placeholder, once a look-up or an encoder worker has told them.
    plan: ItemPlan | None = None
    #: Times that the store has lost it to this request.
    losses: int = 0
    #: The attempt's PD worker has been told that it is stored.
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
    def needs_encoder(self) -> bool:
        return self.status is EmbeddingStatus.PENDING

    @property
    def expected(self) -> bool:
        """Whether a PD worker is expected, or known, to hold it though it is not stored."""
        return self.status in (EmbeddingStatus.EXPECTED, EmbeddingStatus.HELD)

    def look_up(self, stored: ItemPlan | None, expected: ItemPlan | None, epoch: StoreEpoch) -> None:
        """The store's answer, and what a PD worker is expected to hold."""
        if stored is not None:
            self.status, self.origin, self.plan, self.stored_in = (
                EmbeddingStatus.STORED,
                "store",
                stored,
                epoch,
            )
        elif expected is not None:
            self.status, self.origin, self.plan = EmbeddingStatus.EXPECTED, "pd", expected

    def begin_attempt(self) -> None:
        """The next PD worker is sent the request."""
        self.loaded, self.announced = False, self.status is EmbeddingStatus.STORED

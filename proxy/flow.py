"""One answer in flight: its state machine and everything that belongs to it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from triptych.log import short
from triptych.proxy.chat import ChatCall, Delta, Done, ItemTiming, Output
from triptych.proxy.job_runner import ItemSource
from triptych.proxy.lifecycle import Lifecycle
from triptych.proxy.outbox import Outbox
from triptych.proxy.pd_client import PDLink
from triptych.proxy.pool import Binding
from triptych.proxy.splitter import SplitRequest


@dataclass(slots=True)
class Flow:
    """`deadline` is in loop time; `order` is the order of arrival."""

    call: ChatCall
    order: int
    deadline: float
    outbox: Outbox = field(default_factory=Outbox)
    binding: Binding | None = None
    split: SplitRequest | None = None
    lifecycle: Lifecycle = field(default_factory=lambda: Lifecycle({}))
    link: PDLink | None = None
    #: The PD worker of an attempt that was given up; it may still hold the request.
    stale_link: PDLink | None = None
    #: PD workers that have just refused the request.
    refused_by: set[str] = field(default_factory=set)
    #: Where each item's embedding came from.
    origins: dict[str, str] = field(default_factory=dict)
    #: The store's epoch when the item was last known to be there.
    epochs: dict[str, str] = field(default_factory=dict)
    #: When the store's look-up began, in loop time.
    looked_up: float = 0.0
    first_token: float | None = None

    @property
    def resumed(self) -> bool:
        return self.lifecycle.attempt > 1

    def sources(self, processor_options: str) -> dict[str, ItemSource]:
        """What an encoder needs of each distinct item."""
        assert self.split is not None and self.binding is not None
        return {
            item.mm_hash: ItemSource(
                mm_hash=item.mm_hash,
                namespace=self.binding.namespace,
                modality="image",
                media=item.media,
                processor_options=processor_options,
                salt=self.call.salt,
                request_id=self.call.request_id,
                deadline=self.deadline,
                looked_up=self.looked_up,
            )
            for item in self.split.items
        }

    def emit_tokens(self, delta: Delta) -> None:
        if self.first_token is None and delta.token_ids:
            self.first_token = time.monotonic()
        self.outbox.put(delta)

    def emit(self, output: Output) -> None:
        if isinstance(output, Done):
            output.timings.items = self.item_timings()
        self.outbox.put(output)

    def item_timings(self) -> list[ItemTiming]:
        items = self.split.items if self.split is not None else ()
        return [ItemTiming(short(item.mm_hash), self.origins.get(item.mm_hash, "store")) for item in items]

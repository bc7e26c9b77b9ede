"""One answer in flight: its state machine and everything that belongs to it."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

import msgspec

from triptych.log import short
from triptych.proxy.call.chat import ChatCall, Delta, Done, ItemTiming, Output
from triptych.proxy.encoders.job_runner import ItemSource
from triptych.proxy.pd.link import PDLink
from triptych.proxy.pool import Binding
from triptych.proxy.requests.lifecycle import Lifecycle
from triptych.proxy.requests.outbox import Outbox
from triptych.proxy.splitter import SplitRequest


def draw_request_id() -> str:
    """A name that nobody can guess and that is never drawn twice."""
    return secrets.token_hex(16)


@dataclass(slots=True)
class Flow:
    """`deadline` is in loop time; `order` is the order of arrival."""

    call: ChatCall
    order: int
    deadline: float
    outbox: Outbox = field(default_factory=Outbox)
    #: What the workers and everything in this proxy know it by, unlike the client's label.
    request_id: str = field(default_factory=draw_request_id)
    binding: Binding | None = None
    split: SplitRequest | None = None
    lifecycle: Lifecycle = field(default_factory=lambda: Lifecycle({}))
    link: PDLink | None = None
    #: The PD worker of an attempt that was given up; it may still hold the request.
    stale_link: PDLink | None = None
    #: PD workers that have just refused the request.
    refused_by: set[str] = field(default_factory=set)
    #: Fewest tokens of prompt and output that a PD worker has to take, as far as is known.
    least_tokens: int = 0
    #: Where each item's embedding came from.
    origins: dict[str, str] = field(default_factory=dict)
    #: The store's epoch, and the jumps of its clock, when the item was last known to be there.
    epochs: dict[str, tuple[str, int]] = field(default_factory=dict)
    #: When the store's look-up began, in loop time.
    looked_up: float = 0.0
    first_token: float | None = None

    @property
    def name(self) -> str:
        """For logs: the client's label, and the id that worker logs have too."""
        return f"{self.call.label} ({self.request_id})"

    @property
    def resumed(self) -> bool:
        """Whether it has been under way before: it goes before new requests."""
        return self.lifecycle.attempt > 1 or self.call.continues

    def source(self, key: str) -> ItemSource:
        """What an encoder needs of the item with this key."""
        assert self.split is not None and self.binding is not None
        item = next(item for item in self.split.items if item.mm_hash == key)
        return ItemSource(
            mm_hash=key,
            namespace=self.binding.namespace,
            modality=item.modality,
            media=item.media,
            processor_options=msgspec.json.encode(item.options, order="sorted").decode()
            if item.options
            else "",
            salt=self.call.salt,
            request_id=self.request_id,
            label=self.call.label,
            deadline=self.deadline,
            looked_up=self.looked_up,
        )

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

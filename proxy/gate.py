"""Which calls come in."""

from __future__ import annotations

import time
from dataclasses import dataclass

from triptych.errors import Overloaded, Unavailable
from triptych.proxy.backpressure import Backpressure
from triptych.proxy.call.chat import ChatCall
from triptych.proxy.call.model_kind import fit
from triptych.proxy.media.spool import MediaSpool
from triptych.proxy.pool import WorkerPool
from triptych.proxy.requests.lifecycle import RETRY_AFTER


@dataclass(slots=True)
class Gate:
    """Looks at every call before anything is held for it. `max_queue`: choices in flight."""

    pool: WorkerPool
    backpressure: Backpressure
    spool: MediaSpool
    max_queue: int
    #: The proxy stops: nothing comes in any more.
    draining: bool = False

    def admit(self, call: ChatCall, in_flight: int) -> ChatCall:
        """The call as its model takes it; RequestError where it cannot be taken, or not now."""
        if self.draining:
            raise Unavailable("this proxy is stopping", retry_after=RETRY_AFTER)
        call = fit(call, self.pool.kind(self.pool.resolve_model(call.model)))
        if call.continues:
            return call
        if in_flight and in_flight + call.n > self.max_queue:
            raise Overloaded(f"{self.max_queue} requests are in flight already", retry_after=RETRY_AFTER)
        if call.has_items:
            self._check_room_for_media()
        return call

    def admit_query(self, open_queries: int) -> None:
        """RequestError where a question that generates nothing cannot be taken now."""
        if self.draining:
            raise Unavailable("this proxy is stopping", retry_after=RETRY_AFTER)
        if open_queries >= self.max_queue:
            raise Overloaded(f"{self.max_queue} such requests wait already", retry_after=RETRY_AFTER)

    def _check_room_for_media(self) -> None:
        if self.backpressure.refuses_media(time.monotonic()):
            raise Overloaded("embeddings are lost before they are used", retry_after=RETRY_AFTER)
        if self.spool.full:
            raise Overloaded("the media of the requests in flight fill the memory", retry_after=RETRY_AFTER)

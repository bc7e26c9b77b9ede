"""ReplyMemory: what the output of one call takes of the proxy's memory until its client has taken it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from triptych.base.errors import Overloaded, RequestError
from triptych.proxy.call.chat import Delta, Output
from triptych.proxy.http.delivery import CURRENT_DELIVERY
from triptych.proxy.quotas.quota import Quota, QuotaExceeded

#: Memory that every call has from its beginning; more comes in such steps.
STEP = 64 << 10
#: Output of one stream that waits for its client before the PD workers are paused.
WINDOW = 4 << 20
#: Output that may come then even where the quota has no more, and the most in all where it has: what was
#: under way. A worker that cannot pause sends more.
LATE = 4 << 20
UNPAUSED = 16 << 20
#: Bytes that an output takes in memory, and each log-probability of it. Measured.
_DELTA_BYTES, _LOGPROB_BYTES = 192, 224


def output_bytes(output: Output) -> int:
    """About what an output takes in memory."""
    if not isinstance(output, Delta):
        return 0
    nbytes = _DELTA_BYTES + len(output.text)
    if output.logprobs:
        nbytes += sum([_LOGPROB_BYTES * (1 + len(position.top)) for position in output.logprobs])
    return nbytes


class ReplyMemory:
    """A hold of the quota of replies for one call, in steps. QuotaExceeded where not even one is free.

    A stream that its client does not read has its PD workers paused, above WINDOW or where the quota has no
    more, until the client has taken what waits. It ends where the workers do not stop. A reply in one piece
    cannot wait for its client: it ends where the quota has no more.
    """

    def __init__(self, quota: Quota, holder: str, *, whole: bool, logprobs: int | None = None) -> None:
        self.hold = quota.hold(holder, STEP)
        each = _DELTA_BYTES + (0 if logprobs is None else _LOGPROB_BYTES * (1 + logprobs))
        #: Outputs that may wait before they are measured: of a client that reads fewer wait.
        self.unmeasured = STEP // each
        self._delivery = CURRENT_DELIVERY.get()
        self._whole = whole
        #: Bytes of a reply in one piece that have been read, of outputs that wait, and how many these are.
        self._read = self._waiting = self._measured = 0
        #: Something is held or counted, so that the reader's turns matter.
        self.counts = whole
        self.paused = False
        self._limit = 0
        #: Pauses the workers, or has them go on; ends the call.
        self.pause: Callable[[bool], None]
        self.end: Callable[[RequestError], None]
        self.forget()

    def forget(self) -> None:
        """The call has ended: nothing here refers to it any more."""
        self.pause, self.end = (lambda paused: None), (lambda error: None)

    def measure(self, waiting: Sequence[Output]) -> int:
        """Counts the outputs that wait; how many there may be before the next time."""
        self.counts = True
        self._count(waiting)
        self._cover(self._read + self._waiting + self._unsent)
        return len(waiting) + self.unmeasured

    def settle(self, waiting: Sequence[Output]) -> None:
        """The reader of a stream is back: its connection has all that it took before."""
        if self._whole or (self.paused and waiting):
            return
        self._count(waiting)
        used = self._waiting + self._unsent
        self.hold.remove(max((self.hold.amount - max(used, 1)) // STEP * STEP, 0))
        self.counts = bool(waiting) or self.hold.amount > STEP
        if self.paused:
            self.paused = False
            self.pause(False)

    def taken(self, outputs: Sequence[Output]) -> None:
        """The reader has these, and a reply in one piece keeps them."""
        if self._whole:
            self._count(outputs)
            self._read += self._waiting
            self._cover(self._read)
        self._waiting = self._measured = 0

    @property
    def _unsent(self) -> int:
        return 0 if self._delivery is None else self._delivery.unsent

    def _count(self, waiting: Sequence[Output]) -> None:
        self._waiting += sum(map(output_bytes, waiting[self._measured :]))
        self._measured = len(waiting)

    def _cover(self, used: int) -> None:
        more = -(-(used - self.hold.amount) // STEP) * STEP
        if more <= 0:
            return
        error: RequestError = Overloaded("the client does not read, and its PD worker does not wait")
        try:
            if self._whole or self.hold.amount + more <= (UNPAUSED if self.paused else WINDOW):
                self.hold.add(more)
                return
        except QuotaExceeded as exceeded:
            error = exceeded
        if self._whole or (self.paused and used > self._limit):
            self._limit = 1 << 62
            self.end(error)
        elif not self.paused:
            self.paused, self._limit = True, used + LATE
            self.pause(True)

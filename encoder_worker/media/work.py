"""The decode of one job in a thread: the memory that it holds, and its end when nobody waits for it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator

from triptych.base.errors import TooLarge
from triptych.encoder_worker.media.budget import MediaBudget, MediaReservation

#: Seconds of decoding above which a file has a process of its own.
CHEAP_SECONDS = 0.25
#: Decoded bytes of one item that are not counted: no thread holds more of them at once.
SMALL_BYTES = 8 << 20


class TooHeavy(Exception):
    """By its header the file takes too long for a thread, which nothing can end."""


class Abandoned(Exception):
    """The decode was ended, since nobody waits for it."""


class DecodeWork:
    """One decode, made in the event loop and carried out by a thread; `cancel` may be called at any time.

    `heavy` ones may take long and start processes. `limit` are the seconds of decoding that no file may
    take, as its header says. Bytes are held in `decoded` from `hold` to `release`.
    """

    def __init__(
        self,
        *,
        tenant: str = "",
        heavy: bool = True,
        limit: float = 30.0,
        decoded: MediaBudget | None = None,
    ) -> None:
        self.heavy = heavy
        self.limit = limit
        self._tenant = tenant
        self._decoded = decoded
        self._loop = asyncio.get_running_loop() if decoded is not None else None
        self._lock = threading.Lock()
        self._ends: dict[Callable[[], object], None] = {}
        self._held: list[MediaReservation] = []
        self.cancelled = False

    def check(self) -> None:
        """Abandoned where nobody waits for the result."""
        if self.cancelled:
            raise Abandoned

    def expect(self, noun: str, seconds: float, nbytes: int) -> None:
        """What the file's header says, before it is decoded: its seconds are allowed, its bytes held.

        TooLarge above the limit; TooHeavy where this is not the kind of work for it.
        """
        self.check()
        if seconds > self.limit:
            raise too_long(noun, seconds, self.limit)
        if seconds > CHEAP_SECONDS and not self.heavy:
            raise TooHeavy
        self.hold(nbytes)

    def hold(self, nbytes: int) -> None:
        """Waits for room for decoded bytes, once, in the thread. Abandoned when the work is cancelled."""
        decoded, loop = self._decoded, self._loop
        if decoded is None or loop is None or nbytes < SMALL_BYTES:
            return

        async def take() -> None:
            # In the loop, as `release` is: what is granted while the work is cancelled is not lost.
            self._held.append(await decoded.acquire(nbytes, self._tenant))

        asked = asyncio.run_coroutine_threadsafe(take(), loop)
        with self.ended_by(asked.cancel):
            try:
                asked.result()
            except concurrent.futures.CancelledError:
                raise Abandoned from None

    @contextlib.contextmanager
    def ended_by(self, end: Callable[[], object]) -> Iterator[None]:
        """While the body runs in the thread, `cancel` calls `end`."""
        with self._lock:
            self._ends[end] = None
        try:
            if self.cancelled:
                end()
            yield
        finally:
            with self._lock:
                del self._ends[end]

    def cancel(self) -> None:
        """Nobody waits: its process is killed, or it is not begun. Idempotent, from any thread."""
        with self._lock:
            self.cancelled = True
            ends = list(self._ends)
        for end in ends:
            end()

    def release(self) -> None:
        """Gives its bytes back, in the event loop, once the thread has ended. Idempotent."""
        held, self._held = self._held, []
        for reservation in held:
            reservation.release()


def too_long(noun: str, seconds: float, limit: float) -> TooLarge:
    """The refusal of a file whose decode would take so many seconds."""
    return TooLarge(
        f"{noun}: to decode it takes about {seconds:.0f} s, more than the {limit:g} s allowed; "
        "send a smaller or shorter one, or have --max-decode-seconds of the encoder workers raised",
        param=noun,
    )

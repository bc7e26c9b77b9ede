"""Span queue: bounded, emptied by a thread in batches. Neither a slow nor an absent collector is felt."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from triptych.tracing.span import FinishedSpan

logger = logging.getLogger(__name__)

#: Spans that wait at most; the oldest are dropped for new ones. Each takes about a kilobyte.
MOST_SPANS = 8192
BATCH_SPANS = 512
#: Longest wait of a span for others of its batch.
BATCH_SECONDS = 1.0
#: Time in which what is left is sent at the process's end.
CLOSING_SECONDS = 3.0
#: Least time between two warnings.
WARN_SECONDS = 60.0


class SpanQueue:
    """A bounded `SpanSink`; `send` exports a batch in its thread: "" or why it failed; `stop` ends that."""

    def __init__(
        self,
        send: Callable[[Sequence[FinishedSpan]], str],
        stop: Callable[[], None],
        *,
        most: int = MOST_SPANS,
        batch_seconds: float = BATCH_SECONDS,
        closing_seconds: float = CLOSING_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._stop = stop
        self._batch_seconds = batch_seconds
        self._closing_seconds = closing_seconds
        self._clock = clock
        self._spans: deque[FinishedSpan] = deque(maxlen=most)
        self._most = most
        self._wake = threading.Event()
        self._closing = False
        #: Dropped by `add`, and by failed exports, since the last warning.
        self._dropped = 0
        self._failed = 0
        self._warned_at = -WARN_SECONDS
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def add(self, span: FinishedSpan) -> None:
        if len(self._spans) == self._most:
            self._dropped += 1
        self._spans.append(span)
        if len(self._spans) >= BATCH_SPANS and not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Sends what is left, and waits for it for a few seconds at most. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        self._thread.join(self._closing_seconds)
        self._stop()  # a send that still waits for the collector ends
        self._thread.join(0.5)

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(self._batch_seconds)
            self._wake.clear()
            self._send_all()
        self._send_all()

    def _send_all(self) -> None:
        deadline = self._clock() + self._closing_seconds
        while self._spans and not (self._closing and self._clock() > deadline):
            batch = [self._spans.popleft() for _ in range(min(BATCH_SPANS, len(self._spans)))]
            try:
                reason = self._send(batch)
            except Exception as error:
                reason = f"unexpected: {error!r}"
            if reason:
                self._failed += len(batch)
            self._warn(reason)

    def _warn(self, reason: str) -> None:
        """Once a minute at most, with the number of spans lost since."""
        lost = self._dropped + self._failed
        if not lost or self._clock() - self._warned_at < WARN_SECONDS:
            return
        self._warned_at = self._clock()
        why = reason or "more spans come than the collector takes"
        logger.warning("%d spans of traces are lost (%s): see to the collector of --otlp-endpoint", lost, why)
        self._dropped = self._failed = 0

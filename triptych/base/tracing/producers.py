"""Producers of embeddings: the span that computed each item, for the spans that read it later."""

from __future__ import annotations

import threading
from collections import OrderedDict

from triptych.base.tracing.context import SpanContext, from_bytes


class Producers:
    """The producing spans of the latest items, by mm_hash; safe between threads.

    An encoder worker notes an item's span before it saves the embedding, whose stored header carries it; a
    PD worker notes what comes with a load, and links the spans of all that read the item from its cache.
    """

    def __init__(self, most: int = 8192) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._contexts: OrderedDict[str, bytes] = OrderedDict()

    def note(self, mm_hash: str, context: bytes) -> None:
        """The item's producer; empty: it is not known any more."""
        with self._lock:
            self._contexts.pop(mm_hash, None)
            if context:
                self._contexts[mm_hash] = context
            if len(self._contexts) > self._most:
                self._contexts.popitem(last=False)

    def raw(self, mm_hash: str) -> bytes:
        """The producer as it is stored; empty where there is none."""
        with self._lock:
            return self._contexts.get(mm_hash, b"")

    def links(self, mm_hash: str) -> tuple[SpanContext, ...]:
        """The producer as a span's links: one, or none."""
        context = from_bytes(self.raw(mm_hash))
        return () if context is None else (context,)

"""The log of one request's events, sent again to a proxy that lost its stream."""

from __future__ import annotations

import bisect
import time
from array import array
from collections import Counter

from triptych.base.delta import Delta
from triptych.base.errors import RequestError
from triptych.base.log import log_fields
from triptych.base.types import FinishReason, KeptKV
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.core.request_events import EngineEvent
from triptych.pd_worker.events.attempt_trace import AttemptTrace
from triptych.pd_worker.events.token_texts import TokenTexts, logprobs_to_proto
from triptych.protos import common_pb2, pd_pb2
from triptych.protos.convert import error_to_proto, kv_to_proto

#: Events with tokens that are merged into one: a long backlog is sent in parts.
_MAX_TEXTS = 4096
#: Bytes that an event, a token, one of the likeliest tokens, a prompt's id and an item take in a message.
_EVENT_BYTES, _TOKEN_BYTES, _TOP_BYTES, _ID_BYTES, _ITEM_BYTES = 128, 32, 128, 6, 160


class RequestLog:
    """Events of one attempt, and how many of them have been sent.

    Bounded by the request's own output: events that wait for a slow proxy are merged when they are sent.
    `resumed_tokens` are output tokens of earlier attempts, not logged here. Without `texts` there are no
    log-probabilities. It counts among its tenant's `unfinished` until it has finished, or is removed.
    """

    def __init__(
        self,
        request_id: str,
        attempt: int,
        resumed_tokens: int = 0,
        texts: TokenTexts | None = None,
        trace: AttemptTrace | None = None,
        *,
        tenant: str = "",
        unfinished: Counter[str] | None = None,
    ) -> None:
        self._trace = trace
        self.tenant = tenant
        self._unfinished = unfinished
        if unfinished is not None:
            unfinished[tenant] += 1
        self._texts_of = texts
        self.request_id = request_id
        self.attempt = attempt
        self.finished: pd_pb2.Finished | None = None
        #: When the last event was sent, in seconds of the streams' clock.
        self.finished_sent_at: float | None = None
        self._admitted: pd_pb2.RequestEvent | None = None
        #: The latest event of each item.
        self._items: dict[str, pd_pb2.RequestEvent] = {}
        self._first = resumed_tokens
        self._token_ids = array("I")
        #: One text for every Delta, and the output tokens before it.
        self._texts: list[str] = []
        self._starts = array("I")
        #: One per token, or none at all.
        self._logprobs: list[common_pb2.PositionLogprobs] = []
        self._sent_texts = 0
        self._sent_admitted = False
        self._unsent_items: dict[str, None] = {}
        #: A decode worker may take the request over: the next tokens say so.
        self.offered = self._sent_offer = False
        #: What is kept for that worker, where it does not find it by content.
        self.kv: KeptKV | None = None
        #: The engine's request, until it has finished.
        self.request: EngineRequest | None = None

    @property
    def log_extra(self) -> dict[str, object]:
        """The fields of log records about the attempt."""
        trace_id = "" if self._trace is None else self._trace.trace_id
        return log_fields(request_id=self.request_id, attempt=self.attempt, trace_id=trace_id)

    @property
    def position(self) -> int:
        """Output tokens known, those of earlier attempts included."""
        return self._first + len(self._token_ids)

    @property
    def produced(self) -> int:
        """Output tokens of this attempt."""
        return len(self._token_ids)

    def add(self, event: EngineEvent) -> None:
        if isinstance(event, Delta):
            self._starts.append(self.position)
            self._token_ids.extend(event.token_ids)
            self._texts.append(event.text)
            if self._texts_of is not None and event.logprobs:
                self._logprobs += [logprobs_to_proto(raw, self._texts_of) for raw in event.logprobs]
            return
        event.ClearField("proxy_id")
        trace = self._trace
        match event.WhichOneof("body"):
            case "admitted":
                self._admitted = event
                if trace is not None:
                    trace.admitted()
            case "item_loaded":
                self._set_item(event.item_loaded.mm_hash, event)
                if trace is not None:
                    trace.item_loaded(event.item_loaded)
            case "item_missing":
                self._set_item(event.item_missing.mm_hash, event)
                if trace is not None:
                    trace.item_missing(event.item_missing)
            case "finished":
                self.finished = event.finished
                self._count_off()
                if (trace := self._end_trace()) is not None:
                    trace.finished(event.finished)

    def _take_kv(self) -> pd_pb2.KVHandOff | None:
        """What is kept, for the time that is left of it: once, whoever hears of the offer again."""
        kept, self.kv = self.kv, None
        return kv_to_proto(kept, time.monotonic())

    @property
    def _offers(self) -> bool:
        """Whether the next tokens are to say that the request is offered."""
        return self.offered and not self._sent_offer and self.finished is None

    def removed(self) -> None:
        """The log is dropped: ends the trace of an attempt that has not finished."""
        self._count_off()
        if (trace := self._end_trace()) is not None:
            trace.failed("cancelled")

    def _count_off(self) -> None:
        self.request = None
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is not None:
            unfinished[self.tenant] -= 1
            if not unfinished[self.tenant]:
                del unfinished[self.tenant]

    def _end_trace(self) -> AttemptTrace | None:
        trace, self._trace = self._trace, None
        return trace

    def item_ready(self, mm_hash: str) -> None:
        """The item is in the store again: an ItemMissing event is obsolete."""
        known = self._items.get(mm_hash)
        if known is not None and known.WhichOneof("body") == "item_missing":
            del self._items[mm_hash]
            self._unsent_items.pop(mm_hash, None)

    @property
    def unsent_bytes(self) -> int:
        """Approximate size of the unsent events of one message."""
        token_bytes = _TOKEN_BYTES + (_TOP_BYTES * (1 + len(self._logprobs[0].top)) if self._logprobs else 0)
        nbytes = _EVENT_BYTES + min(len(self._texts) - self._sent_texts, _MAX_TEXTS) * token_bytes
        nbytes += _ITEM_BYTES * len(self._unsent_items)
        nbytes += 0 if self.finished is None else len(self.finished.pooled)
        if self._admitted is not None and not self._sent_admitted:
            told = self._admitted.admitted
            nbytes += _ID_BYTES * (len(told.prompt_token_ids) + len(told.encoder_prompt_token_ids))
        return nbytes

    @property
    def has_unsent(self) -> bool:
        """Whether output is left after `drain`, which returns a long backlog in parts."""
        return self._sent_texts < len(self._texts)

    def drain(self, now: float) -> list[pd_pb2.RequestEvent]:
        """Unsent events in order, with new tokens merged into one; of a long backlog the first part."""
        events: list[pd_pb2.RequestEvent] = []
        if self._admitted is not None and not self._sent_admitted:
            self._sent_admitted = True
            events.append(self._admitted)
        events.extend(self._items[mm_hash] for mm_hash in self._unsent_items)
        self._unsent_items.clear()
        if self._sent_texts < len(self._texts):
            events.append(self._event(tokens=self._drain_tokens()))
        if not self.has_unsent:
            events.extend(self.drain_end(now))
        return events

    def drain_plain(self) -> tuple[int, array[int], str] | None:
        """Unsent tokens as (position, token ids, text), where they are all that is unsent; else None.

        Not those of a request with log-probabilities. UnicodeEncodeError for a text that is no Unicode.
        """
        first, last = self._sent_texts, len(self._texts)
        if self.finished is not None or self._unsent_items or self._logprobs:
            return None
        if self._offers or not self._sent_admitted:
            return None
        if first == last or last - first > _MAX_TEXTS:
            return None
        text = self._texts[first] if last - first == 1 else "".join(self._texts[first:last])
        if not text.isascii():
            text.encode()
        self._sent_texts = last
        position = self._starts[first]
        return position, self._token_ids[position - self._first :], text

    def drain_end(self, now: float) -> list[pd_pb2.RequestEvent]:
        """The last event, unless it was sent already."""
        if self.finished is None or self.finished_sent_at is not None:
            return []
        self.finished_sent_at = now
        return [self._event(finished=self.finished)]

    def fail(self, error: RequestError) -> None:
        """Ends the request with `error`; later events of the engine are ignored."""
        self.finished = pd_pb2.Finished(reason=FinishReason.ERROR.value, error=error_to_proto(error))
        self._count_off()
        if (trace := self._end_trace()) is not None:
            trace.failed(error.code)
        self.finished_sent_at = None
        self._sent_texts = len(self._texts)

    def rewind(self, position: int) -> bool:
        """Marks all but the first `position` tokens as unsent.

        False when no message ended at that token: the request cannot be reattached there.
        """
        index = bisect.bisect_left(self._starts, position)
        at = self._starts[index] if index < len(self._starts) else self.position
        if at != position:
            return False
        self._sent_texts = index
        self._sent_admitted = self._sent_offer = False
        self._unsent_items = dict.fromkeys(self._items)
        self.finished_sent_at = None
        return True

    def _drain_tokens(self) -> pd_pb2.Tokens:
        first = self._sent_texts
        last = self._sent_texts = min(first + _MAX_TEXTS, len(self._texts))
        position = self._starts[first]
        end = self._starts[last] if last < len(self._texts) else self.position
        ids = slice(position - self._first, end - self._first)
        offered = self._offers
        self._sent_offer |= offered
        return pd_pb2.Tokens(
            position=position,
            token_ids=self._token_ids[ids],
            text="".join(self._texts[first:last]),
            logprobs=self._logprobs[ids],
            offered=offered,
            kv=self._take_kv() if offered else None,
            cached_tokens=self.request.cached_tokens if offered and self.request is not None else None,
        )

    def _set_item(self, mm_hash: str, event: pd_pb2.RequestEvent) -> None:
        self._items[mm_hash] = event
        self._unsent_items[mm_hash] = None

    def _event(
        self, *, tokens: pd_pb2.Tokens | None = None, finished: pd_pb2.Finished | None = None
    ) -> pd_pb2.RequestEvent:
        return pd_pb2.RequestEvent(
            request_id=self.request_id, attempt=self.attempt, tokens=tokens, finished=finished
        )

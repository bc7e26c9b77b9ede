"""The log of one request's events, sent again to a proxy that lost its stream, and its spans."""

from __future__ import annotations

import bisect
import re
from array import array
from collections import Counter
from dataclasses import dataclass

from tokenizers import Tokenizer

from triptych.base.delta import Delta
from triptych.base.errors import RequestError
from triptych.base.log import log_fields
from triptych.base.tracing import attributes as names
from triptych.base.tracing.context import Producers, hex_trace_id, parse_traceparent
from triptych.base.tracing.tracer import Span, SpanKind, Tracer
from triptych.base.types import FinishReason
from triptych.pd_worker.core.outputs import RawLogprobs
from triptych.pd_worker.core.request_events import EngineEvent
from triptych.protos import common_pb2, pd_pb2
from triptych.protos.convert import error_to_proto

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\u2581"


class TokenTexts:
    """`texts[token_id]` is (text, bytes); half characters are U+FFFD in the text. Thread-safe.

    Bytes are those that the token adds inside of an output: a token that starts a word has its blank.
    Special tokens stand for their own names; an id beyond the vocabulary for nothing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        forms = f"{tokenizer.decoder} {tokenizer.pre_tokenizer}"
        self._byte_level = _byte_level() if "ByteLevel" in forms else None
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._added: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self._known: dict[int, tuple[str, bytes]] = {}

    def __getitem__(self, token_id: int) -> tuple[str, bytes]:
        if (known := self._known.get(token_id)) is None:
            utf8 = self._bytes(token_id)
            known = self._known[token_id] = (utf8.decode("utf-8", "replace"), utf8)
        return known

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        piece: str | None = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level is not None:
            return b"".join(self._byte_level.get(char, char.encode()) for char in piece)
        if match := _BYTE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace(_WORD_START, " ").encode()


def _byte_level() -> dict[str, bytes]:
    """The characters that byte-level vocabularies write bytes with: printable ones stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): bytes([byte]) for byte in printable}
    return table | {chr(256 + index): bytes([byte]) for index, byte in enumerate(others)}


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
        #: Of a request that is offered to a decode worker.
        self._offer: pd_pb2.RequestEvent | None = None
        self._sent_offer = False

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

    def offer(self, kv: pd_pb2.KVHandOff | None = None) -> None:
        """Offers the request to a decode worker, once, from its first token on."""
        if self._offer is None:
            self._offer = pd_pb2.RequestEvent(
                request_id=self.request_id, attempt=self.attempt, hand_over=pd_pb2.HandOver(kv=kv)
            )

    @property
    def _offers(self) -> bool:
        """Whether an offer is to be sent now."""
        unsent = self._offer is not None and not self._sent_offer
        return unsent and bool(self._token_ids) and self.finished is None

    def removed(self) -> None:
        """The log is dropped: ends the trace of an attempt that has not finished."""
        self._count_off()
        if (trace := self._end_trace()) is not None:
            trace.failed("cancelled")

    def _count_off(self) -> None:
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
        nbytes = _EVENT_BYTES + min(len(self._texts) - self._sent_texts, _MAX_TEXTS) * self._token_bytes
        nbytes += _ITEM_BYTES * len(self._unsent_items)
        nbytes += 0 if self.finished is None else len(self.finished.pooled)
        if self._admitted is not None and not self._sent_admitted:
            told = self._admitted.admitted
            nbytes += _ID_BYTES * (len(told.prompt_token_ids) + len(told.encoder_prompt_token_ids))
        return nbytes

    @property
    def _token_bytes(self) -> int:
        return _TOKEN_BYTES + (_TOP_BYTES * (1 + len(self._logprobs[0].top)) if self._logprobs else 0)

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
        if self._offer is not None and self._offers:
            self._sent_offer = True
            events.append(self._offer)
        if not self.has_unsent:
            events.extend(self.drain_end(now))
        return events

    def drain_plain(self) -> tuple[int, array[int], str] | None:
        """Unsent tokens as (position, token ids, text), where they are all that is unsent; else None.

        Not those of a request with log-probabilities. UnicodeEncodeError for a text that is no Unicode.
        """
        first, last = self._sent_texts, len(self._texts)
        if self.finished is not None or self._unsent_items or self._logprobs or not self._sent_admitted:
            return None
        if self._offers:
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
        return pd_pb2.Tokens(
            position=position,
            token_ids=self._token_ids[ids],
            text="".join(self._texts[first:last]),
            logprobs=self._logprobs[ids],
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


def logprobs_to_proto(raw: RawLogprobs, texts: TokenTexts) -> common_pb2.PositionLogprobs:
    def token(token_id: int, logprob: float) -> common_pb2.TokenLogprob:
        text, utf8 = texts[token_id]
        return common_pb2.TokenLogprob(token_id=token_id, logprob=logprob, text=text, utf8=utf8)

    return common_pb2.PositionLogprobs(chosen=token(*raw.chosen), top=[token(*pair) for pair in raw.top])


@dataclass(frozen=True, slots=True)
class PDTraces:
    """What a PD worker's traces need: the tracer, and the spans that computed the items it has loaded."""

    tracer: Tracer
    producers: Producers

    def begin(self, message: pd_pb2.SubmitRequest) -> AttemptTrace | None:
        """The trace of an attempt that has come; None where it is not recorded."""
        parent = parse_traceparent(message.traceparent, message.tracestate)
        start = self.tracer.clock()
        span = self.tracer.start("PD request", parent, kind=SpanKind.SERVER, at=start)
        return AttemptTrace(self, span, start, message) if span.is_recording() else None


class AttemptTrace:
    """The span of one attempt, from Submit to its last event. It has one call for each event but tokens."""

    def __init__(self, traces: PDTraces, span: Span, start: float, message: pd_pb2.SubmitRequest) -> None:
        self.context = span.get_span_context()
        #: For logs.
        self.trace_id = hex_trace_id(self.context)
        self._traces = traces
        self._span = span
        self._start = start
        self._admitted: float | None = None
        span.set_attributes(
            {
                names.REQUEST_ID: message.request_id,
                names.ATTEMPT: message.attempt,
                names.ITEMS: len(message.items),
                names.RESUMED_TOKENS: len(message.resume.output_token_ids),
            }
        )

    def admitted(self) -> None:
        """The bytes of all items are reserved."""
        self._admitted = self._traces.tracer.clock()
        self._traces.tracer.note(self._span, "admitted", self._admitted)

    def item_loaded(self, event: pd_pb2.ItemLoaded) -> None:
        """An item is there, whether it was loaded for this request or not."""
        tracer, at = self._traces.tracer, self._traces.tracer.clock()
        # A load that another request had begun is this one's from its arrival on.
        start = max(self._start, at - event.seconds)
        source = event.path or ("store" if event.seconds > 0.0 else "resident")
        attributes = {**names.item(event.mm_hash), names.SOURCE: source}
        # Linked to the span that computed the embedding, be it another request's.
        links = self._traces.producers.links(event.mm_hash)
        tracer.end(tracer.start("load item", self.context, attributes, at=start, links=links), at)

    def item_missing(self, event: pd_pb2.ItemMissing) -> None:
        """An item is gone from the store, or damaged."""
        name = "item damaged" if event.damaged_digest else "item missing"
        self._traces.tracer.note(self._span, name)

    def finished(self, end: pd_pb2.Finished) -> None:
        """The attempt's last event."""
        self._span.set_attributes(
            {
                names.INPUT_TOKENS: end.prompt_tokens,
                names.CACHED_TOKENS: end.cached_tokens,
                names.OUTPUT_TOKENS: end.completion_tokens,
                names.FINISH_REASONS: (end.reason,),
            }
        )
        self._stages(end)
        self._record(end.error.code)

    def failed(self, error: str) -> None:
        """The attempt ended without a last event of the engine: cancelled, refused, or handed over."""
        self._record(error)

    def _stages(self, end: pd_pb2.Finished) -> None:
        tracer, context, start = self._traces.tracer, self.context, self._start
        tracer.stage("queue", context, start, end.queue_seconds)
        if self._admitted is not None:
            tracer.stage("wait for items", context, self._admitted, end.load_seconds)
        scheduled = start + end.queue_seconds
        tracer.stage("prefill", context, scheduled, end.prefill_seconds)
        tracer.stage("decode", context, scheduled + end.prefill_seconds, end.decode_seconds)

    def _record(self, error: str) -> None:
        if error:
            self._span.set_attribute(names.ERROR_TYPE, error)
        self._traces.tracer.end(self._span, error=error)

"""Transcribes a file window by window. Each window is a request: a PD worker that dies costs one window."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

from triptych.base.delta import Delta
from triptych.base.errors import DeadlineExceeded, InternalError, InvalidRequest
from triptych.base.types import FinishReason, PositionLogprobs, TimestampTokens
from triptych.proxy.call.chat import Admitted, ChatCall, Done, Output
from triptych.proxy.openai.audio.request import TranscriptionRequest, detection_of, window_of
from triptych.proxy.quotas.call_context import CallContext
from triptych.proxy.quotas.current_call import current_call

#: Seconds of one feature frame, the same for all Whisper models.
FRAME_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Window:
    """A window of an audio file in feature frames: its first frame, its length, and the file's length."""

    start: int
    frames: int
    total: int

    @property
    def seconds(self) -> float:
        """Offset of the window in the file."""
        return self.start * FRAME_SECONDS


@dataclass(frozen=True, slots=True)
class Span:
    """A segment: start and end in the file in seconds, and its tokens [first, last) in the output."""

    start: float
    end: float
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class WindowSegments:
    """The segments of one window, and the first frame of the next window."""

    spans: tuple[Span, ...]
    next_start: int


def segment_window(
    window: Window, token_ids: Sequence[int], times: TimestampTokens, *, full: int, eos: bool
) -> WindowSegments:
    """Splits a window's output at its timestamp tokens.

    `full` is the length of a complete window in frames; `eos` says that the last token is end-of-sequence.
    As in transformers, that token belongs to a segment in the last window only.
    """
    final = window.start + full >= window.total
    ids = list(token_ids[:-1] if eos and not final else token_ids)
    is_time = [token >= times.first for token in ids]
    pairs = [index + 1 for index in range(len(ids) - 1) if is_time[index] and is_time[index + 1]]
    if not pairs:
        return WindowSegments((_whole(window, ids, is_time, times),), window.start + window.frames)
    alone = is_time[-2:] == [False, True]
    cuts = [*pairs, len(ids)] if alone else [*pairs[:-1], pairs[-1] + 1]
    spans, first = [], 0
    for cut in cuts:
        last = ids[cut - 1] if cut != cuts[-1] or alone else ids[cut - 2]
        spans.append(Span(_seconds(window, ids[first], times), _seconds(window, last, times), first, cut))
        first = cut
    if alone:
        return WindowSegments(tuple(spans), window.start + window.frames)
    steps = ids[first - 2] - times.first
    ahead = round(steps * times.seconds / FRAME_SECONDS)
    # A last timestamp of 0 would repeat this window for ever.
    return WindowSegments(tuple(spans), window.start + (ahead if ahead > 0 else window.frames))


def _whole(window: Window, ids: list[int], is_time: list[bool], times: TimestampTokens) -> Span:
    """The whole output as one segment, which ends at the last timestamp token if there is one."""
    end = window.seconds + window.frames * FRAME_SECONDS
    stamps = [token for token, time in zip(ids, is_time, strict=True) if time]
    if stamps and stamps[-1] != times.first:
        end = _seconds(window, stamps[-1], times)
    return Span(window.seconds, end, 0, len(ids))


def _seconds(window: Window, token: int, times: TimestampTokens) -> float:
    return window.seconds + (token - times.first) * times.seconds


class ChatBackend(Protocol):
    """The dispatcher's part that the transcriber uses: one call per window."""

    def chat(self, call: ChatCall, context: CallContext) -> AsyncGenerator[list[Output], None]: ...


class DetokenizeBackend(Protocol):
    """Detokenization by a PD worker."""

    async def detokenize(
        self, model: str, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class TimedSegment:
    """A transcribed segment from `start` to `end`, in seconds; `seek` is the first frame of its window."""

    start: float
    end: float
    text: str
    token_ids: tuple[int, ...]
    seek: int
    avg_logprob: float


@dataclass(slots=True)
class FileTranscript:
    """The transcript of a file, as far as it is transcribed."""

    language: str = ""
    frames: int = 0
    segments: list[TimedSegment] = field(default_factory=list)
    text: str = ""

    @property
    def seconds(self) -> float:
        """Length of the whole file."""
        return self.frames * FRAME_SECONDS


@dataclass(slots=True)
class _WindowOutput:
    """The output of one window's request."""

    window: Window | None = None
    times: TimestampTokens | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    reason: FinishReason = FinishReason.STOP

    def add(self, output: Output) -> str:
        """Adds one event of the request; its text."""
        if isinstance(output, Admitted):
            if len(output.frames) != 3:
                raise InternalError("the encoder worker sent no length of the audio file")
            self.window = Window(*output.frames)
            if output.HasField("timestamps"):
                self.times = TimestampTokens(output.timestamps.first, output.timestamps.seconds)
        elif isinstance(output, Delta):
            self.token_ids += output.token_ids
            self.logprobs += output.logprobs
            return output.text
        elif isinstance(output, Done):
            self.reason = output.reason
        return ""


class Transcriber:
    """The transcription of one file. `transcript` grows while `run` is iterated."""

    def __init__(
        self, backend: ChatBackend, detokenizer: DetokenizeBackend, model: str, request: TranscriptionRequest
    ) -> None:
        self.transcript = FileTranscript()
        self._backend = backend
        self._detokenizer = detokenizer
        self._model = model
        self._call = request.call
        self._timed = request.wants_times
        #: The first window's request without timestamps, where the file turned out longer than one window. It
        #: ends once the request with timestamps has its encoder output, so that the item is encoded once.
        self._superseded = AsyncExitStack()
        self._deadline = asyncio.get_running_loop().time() + request.call.timeout

    async def run(self) -> AsyncGenerator[str, None]:
        """The text piece by piece, each of them final. Closing the generator cancels the running request."""
        self._call.media.join()
        try:
            async with self._superseded:
                await self._find_language()
                if not self._timed:
                    async with aclosing(self._single_window()) as pieces:
                        async for piece in pieces:
                            yield piece
                if self._timed:
                    async with aclosing(self._windows()) as pieces:
                        async for piece in pieces:
                            yield piece
        finally:
            self._call.media.leave()

    async def _find_language(self) -> None:
        """Sets the client's language, or else the one the model detects; "en" for a model of English only."""
        assert self._call.transcription is not None
        self.transcript.language = self._call.transcription.language
        if self.transcript.language:
            return
        result = _WindowOutput()
        try:
            async with aclosing(
                self._backend.chat(self._with_deadline(detection_of(self._call)), current_call())
            ) as batches:
                async for outputs in batches:
                    for output in outputs:
                        result.add(output)
        except InvalidRequest as error:
            if error.param != "detect_language":
                raise
            self.transcript.language = "en"
            return
        name = await self._detokenizer.detokenize(self._model, result.token_ids[:1])
        self.transcript.language = name.strip("<|>")

    def _window_call(self, index: int, start: int) -> ChatCall:
        transcription = self._call.transcription
        assert transcription is not None
        call = window_of(self._call, index, start, language=self.transcript.language, timestamps=self._timed)
        return self._with_deadline(call)

    def _with_deadline(self, call: ChatCall) -> ChatCall:
        remaining = self._deadline - asyncio.get_running_loop().time()
        if remaining <= 0:
            raise DeadlineExceeded("the request took longer than its timeout")
        return replace(call, timeout=remaining)

    async def _single_window(self) -> AsyncGenerator[str, None]:
        """A file of one window: its text as it comes. Nothing for a longer file, which needs timestamps."""
        result = _WindowOutput()
        batches = await self._superseded.enter_async_context(
            aclosing(self._backend.chat(self._window_call(0, 0), current_call()))
        )
        async for outputs in batches:
            text = "".join([result.add(output) for output in outputs])
            if result.window is not None:
                self.transcript.frames = result.window.total
                if result.window.total > result.window.frames:
                    self._timed = True
                    return
            if piece := self._append(text):
                yield piece

    def _append(self, text: str) -> str:
        """Appends to the transcript; the text, without leading blanks at the transcript's beginning."""
        if not self.transcript.text:
            text = text.lstrip()
        self.transcript.text += text
        return text

    async def _windows(self) -> AsyncGenerator[str, None]:
        """The text of each window's segments, window after window."""
        start = index = full = 0
        while index == 0 or start < self.transcript.frames:
            result = await self._window(index, start)
            window, times = result.window, result.times
            if window is None or times is None:
                raise InternalError("the PD worker sent no timestamp tokens")
            full = full or window.frames
            self.transcript.frames = window.total
            split = segment_window(
                window, result.token_ids, times, full=full, eos=result.reason is FinishReason.STOP
            )
            segments = await self._segments(result, split, window.start)
            self.transcript.segments += segments
            start, index = split.next_start, index + 1
            if piece := self._append("".join([segment.text for segment in segments])):
                yield piece

    async def _window(self, index: int, start: int) -> _WindowOutput:
        result = _WindowOutput()
        async with aclosing(self._backend.chat(self._window_call(index, start), current_call())) as batches:
            async for outputs in batches:
                for output in outputs:
                    result.add(output)
                await self._superseded.aclose()
        return result

    async def _segments(self, result: _WindowOutput, split: WindowSegments, seek: int) -> list[TimedSegment]:
        pieces = [tuple(result.token_ids[span.first : span.last]) for span in split.spans]
        texts = await asyncio.gather(
            *(self._detokenizer.detokenize(self._model, ids, skip_special_tokens=True) for ids in pieces)
        )
        return [
            TimedSegment(
                span.start, span.end, text, ids, seek, _mean(result.logprobs[span.first : span.last])
            )
            for span, text, ids in zip(split.spans, texts, pieces, strict=True)
        ]


def _mean(logprobs: Sequence[PositionLogprobs]) -> float:
    return sum(position.chosen.logprob for position in logprobs) / len(logprobs) if logprobs else 0.0

"""Writes a file down window by window. Each window is a request: a worker that is lost costs one window."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

from triptych.errors import DeadlineExceeded, InternalError, InvalidRequest
from triptych.proxy.call.chat import ChatCall, Delta, Done, Output, Started
from triptych.proxy.openai.audio.request import TranscriptionRequest, detection_of, window_of
from triptych.proxy.openai.audio.windows import FRAME_SECONDS, Heard, Window, hear
from triptych.types import FinishReason, PositionLogprobs, TimestampTokens


class Chats(Protocol):
    """What the transcriber asks of the dispatcher."""

    def chat(self, call: ChatCall) -> AsyncGenerator[list[Output], None]: ...


class Texts(Protocol):
    """What it asks of PD workers beside."""

    async def detokenize(
        self, model: str, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class TimedSegment:
    """What was said from `start` to `end`, in seconds; `seek` is the first frame of its window."""

    start: float
    end: float
    text: str
    token_ids: tuple[int, ...]
    seek: int
    avg_logprob: float


@dataclass(slots=True)
class FileTranscript:
    """All that is known of a file so far."""

    language: str = ""
    frames: int = 0
    segments: list[TimedSegment] = field(default_factory=list)
    text: str = ""

    @property
    def seconds(self) -> float:
        """Of the whole file."""
        return self.frames * FRAME_SECONDS


@dataclass(slots=True)
class _Output:
    """What a window has put out."""

    window: Window | None = None
    times: TimestampTokens | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    reason: FinishReason = FinishReason.STOP

    def take(self, output: Output) -> str:
        """The output's text."""
        if isinstance(output, Started):
            if len(output.frames) != 3:
                raise InternalError("the encoder has not said how long the file is")
            self.window, self.times = Window(*output.frames), output.timestamps
        elif isinstance(output, Delta):
            self.token_ids += output.token_ids
            self.logprobs += output.logprobs
            return output.text
        elif isinstance(output, Done):
            self.reason = output.reason
        return ""


class Transcriber:
    """One file. `transcript` grows while `run` is iterated."""

    def __init__(self, chats: Chats, texts: Texts, model: str, request: TranscriptionRequest) -> None:
        self.transcript = FileTranscript()
        self._chats = chats
        self._texts = texts
        self._model = model
        self._call = request.call
        self._timed = request.wants_times
        #: A first window without timestamps. It ends once the one with them has its item: else the encoder
        #: would do the same work twice.
        self._superseded = AsyncExitStack()
        self._deadline = asyncio.get_running_loop().time() + request.call.timeout

    async def run(self) -> AsyncGenerator[str, None]:
        """The text in pieces as it becomes certain. Closing the generator cancels what is under way."""
        self._call.media.join()
        try:
            async with self._superseded:
                await self._find_language()
                if not self._timed:
                    async with aclosing(self._plain()) as pieces:
                        async for piece in pieces:
                            yield piece
                if self._timed:
                    async with aclosing(self._long()) as pieces:
                        async for piece in pieces:
                            yield piece
        finally:
            self._call.media.leave()

    async def _find_language(self) -> None:
        """As the client says, else as the model hears it; nothing where the model knows only one."""
        assert self._call.transcription is not None
        self.transcript.language = self._call.transcription.language
        if self.transcript.language:
            return
        heard = _Output()
        try:
            async with aclosing(self._chats.chat(self._in_time(detection_of(self._call)))) as batches:
                async for outputs in batches:
                    for output in outputs:
                        heard.take(output)
        except InvalidRequest as error:
            if error.param != "detect_language":
                raise
            self.transcript.language = "en"
            return
        name = await self._texts.detokenize(self._model, heard.token_ids[:1])
        self.transcript.language = name.strip("<|>")

    def _window_call(self, index: int, start: int) -> ChatCall:
        transcription = self._call.transcription
        assert transcription is not None
        call = window_of(self._call, index, start, language=self.transcript.language, timestamps=self._timed)
        return self._in_time(call)

    def _in_time(self, call: ChatCall) -> ChatCall:
        remaining = self._deadline - asyncio.get_running_loop().time()
        if remaining <= 0:
            raise DeadlineExceeded("the request took longer than its timeout")
        return replace(call, timeout=remaining)

    async def _plain(self) -> AsyncGenerator[str, None]:
        """A file of one window: its text as it comes. A longer one needs timestamps: nothing comes of it."""
        heard = _Output()
        batches = await self._superseded.enter_async_context(
            aclosing(self._chats.chat(self._window_call(0, 0)))
        )
        async for outputs in batches:
            text = "".join([heard.take(output) for output in outputs])
            if heard.window is not None:
                self.transcript.frames = heard.window.total
                if heard.window.total > heard.window.frames:
                    self._timed = True
                    return
            if piece := self._begun(text):
                yield piece

    def _begun(self, text: str) -> str:
        """The text without blanks before all of it."""
        if not self.transcript.text:
            text = text.lstrip()
        self.transcript.text += text
        return text

    async def _long(self) -> AsyncGenerator[str, None]:
        """Window after window: the text of each window's segments."""
        start = index = full = 0
        while index == 0 or start < self.transcript.frames:
            heard = await self._window(index, start)
            window, times = heard.window, heard.times
            if window is None or times is None:
                raise InternalError("the PD worker has not said what its timestamps are")
            full = full or window.frames
            self.transcript.frames = window.total
            cut = hear(window, heard.token_ids, times, full=full, eos=heard.reason is FinishReason.STOP)
            segments = await self._segments(heard, cut, window.start)
            self.transcript.segments += segments
            start, index = cut.next_start, index + 1
            if piece := self._begun("".join([segment.text for segment in segments])):
                yield piece

    async def _window(self, index: int, start: int) -> _Output:
        heard = _Output()
        async with aclosing(self._chats.chat(self._window_call(index, start))) as batches:
            async for outputs in batches:
                for output in outputs:
                    heard.take(output)
                await self._superseded.aclose()
        return heard

    async def _segments(self, heard: _Output, cut: Heard, seek: int) -> list[TimedSegment]:
        pieces = [tuple(heard.token_ids[span.first : span.last]) for span in cut.spans]
        texts = await asyncio.gather(
            *(self._texts.detokenize(self._model, ids, skip_special_tokens=True) for ids in pieces)
        )
        return [
            TimedSegment(span.start, span.end, text, ids, seek, _mean(heard.logprobs[span.first : span.last]))
            for span, text, ids in zip(cut.spans, texts, pieces, strict=True)
        ]


def _mean(logprobs: Sequence[PositionLogprobs]) -> float:
    return sum(position.chosen.logprob for position in logprobs) / len(logprobs) if logprobs else 0.0

"""Transcribes a file by a decoder-only model: one request, whose prompt its PD worker writes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from triptych.base.delta import Delta
from triptych.base.errors import InvalidRequest
from triptych.proxy.call.chat import Admitted, ChatCall, ChatMessage
from triptych.proxy.media.source import AudioPart
from triptych.proxy.openai.audio.request import TranscriptionRequest
from triptych.proxy.openai.audio.transcriber import ChatBackend, FileTranscript
from triptych.proxy.quotas.current_call import current_call

#: What Qwen3-ASR writes before and after a language's name, and then the transcript.
_BEFORE, _AFTER = "language ", "<asr_text>"
_LONGEST_NAME = 64


class ChatTranscriber:
    """The transcription of one file. `transcript` grows while `run` is iterated."""

    def __init__(self, backend: ChatBackend, request: TranscriptionRequest) -> None:
        self.transcript = FileTranscript()
        self._backend = backend
        self._call = _chat_of(request)
        #: The output's beginning, while it may name a language; None afterwards.
        self._head: str | None = ""

    async def run(self) -> AsyncGenerator[str, None]:
        """The text piece by piece. Closing the generator cancels the request."""
        assert self._call.transcription is not None
        self.transcript.language = self._call.transcription.language
        async with aclosing(self._backend.chat(self._call, current_call())) as batches:
            async for outputs in batches:
                for output in outputs:
                    if isinstance(output, Admitted):
                        self.transcript.frames = output.frames[-1] if output.frames else 0
                    elif isinstance(output, Delta) and (piece := self._append(output.text)):
                        yield piece
        if self._head:
            self.transcript.text, self._head = self._head, None
            yield self.transcript.text

    def _append(self, text: str) -> str:
        """The transcript's part of the output."""
        if self._head is not None:
            head = self._head + text
            name, mark, rest = head.partition(_AFTER)
            named = head.startswith(_BEFORE) or _BEFORE.startswith(head)
            if named and not mark and len(head) < _LONGEST_NAME:
                self._head = head
                return ""
            if named and mark:
                self.transcript.language = name.removeprefix(_BEFORE).strip().lower()
                head = rest
            self._head, text = None, head
        if not self.transcript.text:
            text = text.lstrip()
        self.transcript.text += text
        return text


def _chat_of(request: TranscriptionRequest) -> ChatCall:
    """One user message with the file. InvalidRequest for a reply with times, which it does not say."""
    call = request.call
    if request.wants_times:
        raise InvalidRequest(
            "response_format: this model says no times: send json or text", param="response_format"
        )
    assert call.encoder is not None and isinstance(call.encoder.source, AudioPart)
    return replace(call, encoder=None, messages=(ChatMessage("user", (call.encoder.source,)),))

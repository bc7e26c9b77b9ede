"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing

from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.http.endpoint import HttpReply, PostEndpoint
from triptych.proxy.http.form_body import parse_form
from triptych.proxy.http.sse import DONE
from triptych.proxy.openai.audio.replies import delta_event, done_event, whole_reply
from triptych.proxy.openai.audio.request import FIELDS, TranscriptionRequest, parse_transcription
from triptych.proxy.openai.audio.transcriber import Transcriber
from triptych.proxy.pd.queries import PDQueries


class AudioEndpoint(PostEndpoint[TranscriptionRequest]):
    """A form with a file in; a transcript, or with `translates` its English, out."""

    wanted = "send a form with an audio file, such as curl -F file=@speech.wav"
    smaller = "send a smaller file, such as FLAC, or cut it"
    known = FIELDS

    def __init__(
        self, dispatcher: Dispatcher, queries: PDQueries, *, translates: bool, max_body: int, timeout: float
    ) -> None:
        super().__init__(dispatcher.quotas["parser"], max_body=max_body)
        self._dispatcher = dispatcher
        self._queries = queries
        self._translates = translates
        self._timeout = timeout

    def parse(self, raw: bytes, request_id: str, content_type: bytes = b"") -> TranscriptionRequest:
        form = parse_form(content_type, raw)
        return parse_transcription(form, request_id, translates=self._translates, timeout=self._timeout)

    def names(self, raw: bytes, request: TranscriptionRequest) -> Iterable[str]:
        return request.names

    async def answer(self, request: TranscriptionRequest, reply: HttpReply) -> None:
        model = self._dispatcher.resolve_model(request.call.model)
        transcriber = Transcriber(self._dispatcher, self._queries, model, request)
        async with aclosing(transcriber.run()) as pieces:
            async for piece in pieces:
                if request.stream:
                    await reply.part(delta_event(piece))
        transcript = transcriber.transcript
        if request.stream:
            await reply.part(done_event(transcript) + DONE, last=True)
            return
        body, content_type = whole_reply(request, transcript)
        await reply.whole(body, content_type=content_type)

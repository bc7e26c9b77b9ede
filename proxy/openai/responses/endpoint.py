"""POST /v1/responses: OpenAI's Responses API without its memory."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from triptych.base.errors import RequestError
from triptych.proxy.call.chat import Done
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.http.endpoint import HttpReply, PostEndpoint, WritePacer
from triptych.proxy.http.sse import to_json
from triptych.proxy.openai.responses.replies import ResponseBook, sse
from triptych.proxy.openai.responses.request import ResponsesBody, ResponsesRequest, parse_responses


class ResponsesEndpoint(PostEndpoint[ResponsesRequest]):
    """Translates to a chat call and back; nothing is kept between requests."""

    known = ResponsesBody.__struct_fields__

    def __init__(self, dispatcher: Dispatcher, *, max_images: int, max_body: int, timeout: float) -> None:
        super().__init__(dispatcher.quotas["parser"], max_body=max_body)
        self._dispatcher = dispatcher
        self._max_images = max_images
        self._timeout = timeout

    def parse(self, raw: bytes, request_id: str, content_type: bytes = b"") -> ResponsesRequest:
        return parse_responses(raw, request_id, max_images=self._max_images, timeout=self._timeout)

    async def answer(self, request: ResponsesRequest, reply: HttpReply) -> None:
        book = ResponseBook(request, self._dispatcher.resolve_model(request.call.model))
        try:
            await self._answer(request, book, reply)
        except RequestError as error:
            named = request.names.translated(error)
            if not (request.options.stream and book.begun):
                raise named from None
            await reply.part(b"".join(map(sse, book.fail(named))), last=True)

    async def _answer(self, request: ResponsesRequest, book: ResponseBook, reply: HttpReply) -> None:
        async with aclosing(self._dispatcher.chat(request.call)) as batches:
            if not request.options.stream:
                async for outputs in batches:
                    for _ in book.take(outputs):
                        pass
                await reply.whole(to_json(book.response))
                return
            pace = WritePacer()
            async for outputs in batches:
                # Each event is rendered before the next one changes the response.
                if part := b"".join(map(sse, book.take(outputs))):
                    last = isinstance(outputs[-1], Done)
                    await reply.part(part, last=last)
                    if not last and (pause := pace.pause()):
                        await asyncio.sleep(pause)

"""POST /v1/chat/completions."""

from __future__ import annotations

from contextlib import aclosing

from triptych.proxy.call.chat import ChatCall, Done
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.http.endpoint import HttpReply, PostEndpoint, WritePacer
from triptych.proxy.openai.chat.replies import ChatStream, whole_reply
from triptych.proxy.openai.chat.request import ChatReplyOptions, parse_body


class ChatEndpoint(PostEndpoint[tuple[ChatCall, ChatReplyOptions]]):
    """A conversation in; the assistant's next message out."""

    def __init__(
        self, dispatcher: Dispatcher, *, max_images: int, max_body: int, timeout: float, max_choices: int = 16
    ) -> None:
        super().__init__(max_body=max_body)
        self._dispatcher = dispatcher
        self._max_images = max_images
        self._max_choices = max_choices
        self._timeout = timeout

    def parse(
        self, raw: bytes, request_id: str, content_type: bytes = b""
    ) -> tuple[ChatCall, ChatReplyOptions]:
        return parse_body(
            raw,
            request_id,
            max_images=self._max_images,
            timeout=self._timeout,
            max_choices=self._max_choices,
        )

    async def answer(self, request: tuple[ChatCall, ChatReplyOptions], reply: HttpReply) -> None:
        call, options = request
        model = self._dispatcher.resolve_model(call.model)
        async with aclosing(self._dispatcher.chat(call)) as batches:
            if not options.stream:
                await reply.whole(await whole_reply(call.label, model, options, batches))
                return
            stream = ChatStream(call.label, model, options)
            pace = WritePacer()
            async for outputs in batches:
                if part := stream.render(outputs):
                    end = outputs[-1]
                    last = isinstance(end, Done) and end.final
                    await reply.part(part, last=last)
                    if not last:
                        await pace.written()

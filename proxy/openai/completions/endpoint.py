"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.http.exchange import JsonEndpoint, Pace, Reply
from triptych.proxy.openai.completions.prompts_together import all_together
from triptych.proxy.openai.completions.replies import CompletionBook, CompletionReply, CompletionStream
from triptych.proxy.openai.completions.request import CompletionRequest, parse_completion
from triptych.proxy.pd.queries import PDQueries


class CompletionsEndpoint(JsonEndpoint[CompletionRequest]):
    """OpenAI's legacy completions: prompts that no chat template touches."""

    def __init__(
        self, dispatcher: Dispatcher, queries: PDQueries, *, max_choices: int, max_body: int, timeout: float
    ) -> None:
        super().__init__(max_body=max_body)
        self._dispatcher = dispatcher
        self._queries = queries
        self._max_choices = max_choices
        self._timeout = timeout

    def parse(self, raw: bytes, request_id: str, content_type: bytes = b"") -> CompletionRequest:
        return parse_completion(raw, request_id, timeout=self._timeout, max_choices=self._max_choices)

    async def answer(self, request: CompletionRequest, reply: Reply) -> None:
        model = self._dispatcher.resolve_model(request.calls[0].model)
        book = CompletionBook(request.request_id, model, request.options, await self._echoes(request, model))
        async with aclosing(all_together(self._dispatcher.chat, request.calls)) as batches:
            if not request.options.stream:
                whole = CompletionReply(book)
                async for prompt, outputs in batches:
                    whole.take(prompt, outputs)
                await reply.whole(whole.body())
                return
            stream = CompletionStream(book)
            pace = Pace()
            async for prompt, outputs in batches:
                if part := stream.render(prompt, outputs):
                    await reply.part(part, last=book.open == 0)
                    if book.open:
                        await pace.written()

    async def _echoes(self, request: CompletionRequest, model: str) -> list[str]:
        """The prompts' texts, where they are to be repeated."""
        if not request.options.echo:
            return []
        return await asyncio.gather(
            *(
                _as_it_is(prompt)
                if isinstance(prompt, str)
                else self._queries.detokenize(model, prompt or ())
                for prompt in request.options.prompts
            )
        )


async def _as_it_is(text: str) -> str:
    return text

"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from triptych.proxy.call.chat import ChatCall, Output
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.http.endpoint import HttpReply, PostEndpoint, WritePacer
from triptych.proxy.openai.completions.replies import CompletionBook, CompletionReply, CompletionStream
from triptych.proxy.openai.completions.request import CompletionBody, CompletionRequest, parse_completion
from triptych.proxy.pd.queries import PDQueries

#: The index of a prompt's call, and its outputs.
PromptOutputs = tuple[int, list[Output]]


class CompletionsEndpoint(PostEndpoint[CompletionRequest]):
    """OpenAI's legacy completions: prompts that no chat template touches."""

    known = CompletionBody.__struct_fields__

    def __init__(
        self, dispatcher: Dispatcher, queries: PDQueries, *, max_choices: int, max_body: int, timeout: float
    ) -> None:
        super().__init__(dispatcher.quotas["parser"], max_body=max_body)
        self._dispatcher = dispatcher
        self._queries = queries
        self._max_choices = max_choices
        self._timeout = timeout

    def parse(self, raw: bytes, request_id: str, content_type: bytes = b"") -> CompletionRequest:
        return parse_completion(raw, request_id, timeout=self._timeout, max_choices=self._max_choices)

    async def answer(self, request: CompletionRequest, reply: HttpReply) -> None:
        model = self._dispatcher.resolve_model(request.calls[0].model)
        book = CompletionBook(request.request_id, model, request.options, await self._echoes(request, model))
        async with aclosing(all_together(self._dispatcher.chat, request.calls)) as batches:
            if not request.options.stream:
                whole = CompletionReply(book)
                async for prompt, outputs in batches:
                    whole.add(prompt, outputs)
                await reply.whole(whole.body())
                return
            stream = CompletionStream(book)
            pace = WritePacer()
            async for prompt, outputs in batches:
                if part := stream.render(prompt, outputs):
                    await reply.part(part, last=book.open == 0)
                    if book.open and (pause := pace.pause()):
                        await asyncio.sleep(pause)

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


async def all_together(
    chat: Callable[[ChatCall], AsyncGenerator[list[Output], None]], calls: Sequence[ChatCall]
) -> AsyncGenerator[PromptOutputs, None]:
    """(index of the call, its outputs), in the order in which they come; ends when all calls have.

    The first error of any call is raised and ends the others, and so does closing the iterator.
    """
    if len(calls) == 1:
        async with aclosing(chat(calls[0])) as batches:
            async for outputs in batches:
                yield 0, outputs
        return
    # Small: a call whose reader is slow waits with its own outbox, not here.
    queue: asyncio.Queue[PromptOutputs | None] = asyncio.Queue(len(calls))

    async def pump(index: int, call: ChatCall) -> None:
        async with aclosing(chat(call)) as batches:
            async for outputs in batches:
                await queue.put((index, outputs))

    async def pump_all() -> None:
        async with asyncio.TaskGroup() as group:
            for index, call in enumerate(calls):
                group.create_task(pump(index, call))
        await queue.put(None)

    task = asyncio.create_task(pump_all())
    try:
        while (batch := await _next(queue, task)) is not None:
            yield batch
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _next(queue: asyncio.Queue[PromptOutputs | None], task: asyncio.Task[None]) -> PromptOutputs | None:
    """The next batch; raises the first error of the calls."""
    waiting = asyncio.create_task(queue.get())
    try:
        await asyncio.wait((waiting, task), return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        if task.done() and (error := task.exception()) is not None:
            raise _first(error)
        return await waiting
    finally:
        waiting.cancel()


def _first(error: BaseException) -> BaseException:
    """The first error inside an exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

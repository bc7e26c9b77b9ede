"""Several calls of one request beside each other: what they put out, as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from triptych.proxy.call.chat import ChatCall, Output

Batch = tuple[int, list[Output]]


async def all_together(
    chat: Callable[[ChatCall], AsyncGenerator[list[Output], None]], calls: Sequence[ChatCall]
) -> AsyncGenerator[Batch, None]:
    """(index of the call, its outputs), in the order in which they come; ends when all calls have.

    The first error of any call is raised and ends the others, and so does closing the iterator.
    """
    if len(calls) == 1:
        async with aclosing(chat(calls[0])) as batches:
            async for outputs in batches:
                yield 0, outputs
        return
    # Small: a call whose reader is slow waits with its own outbox, not here.
    queue: asyncio.Queue[Batch | None] = asyncio.Queue(len(calls))

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


async def _next(queue: asyncio.Queue[Batch | None], task: asyncio.Task[None]) -> Batch | None:
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

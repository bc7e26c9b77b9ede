"""Calls without generation: how they begin, some of a request at a time, and their vectors."""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

from triptych.base.errors import DeadlineExceeded, InternalError, Overloaded
from triptych.base.types import SamplingParams
from triptych.proxy.call.chat import ChatCall, Done, Output, PoolingOptions, RawPrompt
from triptych.proxy.call.validation import check_options, check_salt
from triptych.proxy.media.spool import MediaHold

#: Inputs, or documents, of one request.
MAX_INPUTS = 2048
#: Calls of one request under way at once: they fill a step of a PD worker, and leave places for others.
AT_ONCE = 32


def vector_of(done: Done) -> array[float]:
    """The vector of a pooled call, of float32; InternalError for bytes that are none."""
    if not done.pooled or len(done.pooled) % 4:
        raise InternalError("the PD worker has pooled nothing")
    vector = array("f", done.pooled)
    if sys.byteorder == "big":
        vector.byteswap()
    return vector


def rows_of(done: Done) -> list[array[float]]:
    """The vector of each token of a call's prompt; InternalError for bytes that are none."""
    vectors, tokens = vector_of(done), done.usage.prompt_tokens
    if not tokens or len(vectors) % tokens:
        raise InternalError("the PD worker's vectors are not one for each token")
    width = len(vectors) // tokens
    return [vectors[start : start + width] for start in range(0, len(vectors), width)]


async def pool_all(
    chat: Callable[[ChatCall], AsyncGenerator[list[Output], None]],
    calls: Sequence[ChatCall],
    keep: Callable[[int, Done], Awaitable[None] | None],
) -> None:
    """Hands `keep` the end of each call, with its index. The first error ends all; so does cancellation.

    While the proxy, or the client's key, has no place for one more, those that are under way go first. All
    have the first call's timeout together.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + calls[0].timeout
    left = deque(range(len(calls)))
    workers = min(AT_ONCE, len(calls))

    async def work() -> None:
        nonlocal workers
        while left:
            index, alone = left.popleft(), workers == 1
            try:
                done = await end_of(
                    chat, replace(calls[index], timeout=deadline - clock(), is_part=index > 0)
                )
            except Overloaded:
                if alone:
                    raise
                left.appendleft(index)
                if workers > 1:
                    break
                # The others have ended since this one began: their place is free now.
                continue
            if (kept := keep(index, done)) is not None:
                await kept
        workers -= 1

    calls[0].media.join()  # Calls about one picture share it.
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    finally:
        calls[0].media.leave()


async def end_of(chat: Callable[[ChatCall], AsyncGenerator[list[Output], None]], call: ChatCall) -> Done:
    """The end of a call; DeadlineExceeded where it has no time left."""
    if call.timeout <= 0:
        raise DeadlineExceeded("the request took longer than its timeout: send fewer inputs at once")
    async with aclosing(chat(call)) as batches:
        async for outputs in batches:
            if isinstance(outputs[-1], Done):
                return outputs[-1]
    raise InternalError("a call has ended without its end")


def first_error(error: BaseException) -> BaseException:
    """The first error inside an exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def pooled_call(
    label: str,
    model: str,
    timeout: float,
    pooling: PoolingOptions,
    cache_salt: str,
    processor_options: Mapping[str, object],
    priority: int = 0,
) -> ChatCall:
    """A call that has no prompt yet; InvalidRequest for a salt or options out of bounds."""
    return ChatCall(
        label=label,
        model=model,
        messages=(),
        sampling=SamplingParams(),
        timeout=timeout,
        cache_salt=check_salt(cache_salt),
        processor_options=check_options(processor_options),
        priority=priority,
        pooling=pooling,
        whole=True,
    )


def input_calls(
    first: ChatCall, prompts: Sequence[RawPrompt], param: str, *, several: bool
) -> list[ChatCall]:
    """One call for each prompt; `several`: a worker's complaint names its place in the field `param`."""
    return [
        replace(
            first,
            label=f"{first.label}#i{at}" if at else first.label,
            prompt=prompt,
            prompt_param=f"{param}[{at}]" if several else param,
            media=MediaHold(),
        )
        for at, prompt in enumerate(prompts)
    ]

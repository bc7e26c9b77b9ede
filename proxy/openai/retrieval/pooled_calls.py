"""The calls of one request without generation, some at a time, and what comes back of them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

import numpy as np

from triptych.base.errors import DeadlineExceeded, InternalError, Overloaded
from triptych.proxy.call.chat import ChatCall, Done, Output
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.http.delivery import CURRENT_DELIVERY
from triptych.proxy.http.endpoint import PostEndpoint
from triptych.proxy.http.json_body import to_json
from triptych.proxy.quotas.quota import HOLDER, Quota

#: Calls of one request under way at once: they fill a step of a PD worker, and leave places for others.
AT_ONCE = 32
P = TypeVar("P")
Vector = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


class PooledReply:
    """A reply of one part for each call, which count as the reply's memory as they come."""

    def __init__(self, quota: Quota, count: int = 0) -> None:
        self._hold = quota.hold(HOLDER.get(), 0)
        if (delivery := CURRENT_DELIVERY.get()) is not None:
            delivery.keep(self._hold)
        self._parts: list[bytes] = [b""] * count
        self._prompt_tokens = self._cached_tokens = 0

    def put(self, index: int, part: bytes) -> None:
        """QuotaExceeded where there is no memory for the part."""
        self._hold.add(len(part))
        self._parts[index] = part

    def append(self, part: bytes) -> None:
        """As `put`, after all parts."""
        self._hold.add(len(part))
        self._parts.append(part)

    def count(self, done: Done) -> None:
        """A call's prompt is part of the usage."""
        self._prompt_tokens += done.usage.prompt_tokens
        self._cached_tokens += done.usage.cached_tokens

    def body(self, head: Mapping[str, object], name: str) -> bytes:
        """The JSON reply, its parts under `name`."""
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "total_tokens": self._prompt_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }
        before, after = to_json({**head, name: [], "usage": usage}).split(f'"{name}":[]'.encode())
        return b"".join((before, f'"{name}":['.encode(), b",".join(self._parts), b"]", after))


class PooledEndpoint(PostEndpoint[P]):
    """An endpoint whose calls are pooled; `max_images` are those of one prompt."""

    smaller = "send fewer inputs at once"

    def __init__(self, dispatcher: Dispatcher, *, max_images: int, max_body: int, timeout: float) -> None:
        super().__init__(dispatcher.quotas["parser"], max_body=max_body)
        self.dispatcher = dispatcher
        self.max_images = max_images
        self.timeout = timeout


def vector_of(done: Done) -> Vector:
    """The vector of a pooled call; InternalError for bytes that are none."""
    if not done.pooled or len(done.pooled) % 4:
        raise InternalError("the PD worker has pooled nothing")
    return np.frombuffer(done.pooled, "<f4")


async def pool_all(
    chat: Callable[[ChatCall], AsyncGenerator[list[Output], None]],
    calls: Sequence[ChatCall],
    keep: Callable[[int, Done], None],
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
            index = left.popleft()
            try:
                done = await _done(chat, replace(calls[index], timeout=deadline - clock(), is_part=index > 0))
            except Overloaded:
                if workers == 1:
                    raise
                workers -= 1
                left.appendleft(index)
                return
            keep(index, done)

    calls[0].media.join()  # Calls about one picture share it.
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise _first(errors) from None
    finally:
        calls[0].media.leave()


async def _done(chat: Callable[[ChatCall], AsyncGenerator[list[Output], None]], call: ChatCall) -> Done:
    if call.timeout <= 0:
        raise DeadlineExceeded("the request took longer than its timeout: send fewer inputs at once")
    async with aclosing(chat(call)) as batches:
        async for outputs in batches:
            if isinstance(outputs[-1], Done):
                return outputs[-1]
    raise InternalError("a call has ended without its end")


def _first(error: BaseException) -> BaseException:
    """The first error inside an exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

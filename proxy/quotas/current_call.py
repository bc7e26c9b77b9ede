"""Which call the running code serves: the one context variable of the proxy.

The ways in set it while a request comes in, and what they call on the way reads the holder here. The
dispatcher is handed the context.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from triptych.proxy.quotas.call_context import NOBODY, CallContext

_CURRENT: ContextVar[CallContext] = ContextVar("call", default=NOBODY)


def current_call() -> CallContext:
    """That of the call that the running task, or thread of asyncio's, was started for."""
    return _CURRENT.get()


@contextmanager
def in_call(**changes: Any) -> Iterator[CallContext]:
    """The block serves the call with these changes."""
    before = _CURRENT.get()
    context = replace(before, **changes)
    _CURRENT.set(context)
    try:
        yield context
    finally:
        _CURRENT.set(before)

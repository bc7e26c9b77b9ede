"""Where a body is parsed: on the event loop, in the thread, in a process before."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator

import pytest

from triptych.proxy.parsing.parse import Parse
from triptych.proxy.parsing.parsers import INLINE_BYTES, THREAD_BYTES, Parsers
from triptych.proxy.quotas.quota import Quota, QuotaSpec


def _quota(capacity: int) -> Quota:
    return Quota(QuotaSpec("parser", capacity, "bodies", "", "", "", wait_seconds=60.0))


@pytest.fixture
async def parsers() -> AsyncIterator[Parsers]:
    made = Parsers(_quota(1), _quota(2))
    yield made
    await made.close()


def where(raw: bytes) -> tuple[int, str]:
    return len(raw), threading.current_thread().name


@pytest.mark.parametrize(
    ("size", "few", "thread", "processes"),
    [
        (1, True, "MainThread", 0),
        (INLINE_BYTES, True, "MainThread", 0),
        (INLINE_BYTES, False, "parse_0", 0),
        (INLINE_BYTES + 1, True, "parse_0", 0),
        (THREAD_BYTES, True, "parse_0", 0),
        (THREAD_BYTES + 1, True, "parse_0", 1),
    ],
)
async def test_a_body_is_parsed_by_its_size(
    parsers: Parsers, size: int, few: bool, thread: str, processes: int
) -> None:
    parse = Parse(where)
    # What a process can import.
    parse = Parse(where) if size <= THREAD_BYTES else Parse(os.fspath)
    assert await parsers.run("", bytes(size), parse, where, few=few) == (size, thread)
    assert len(parsers.pool._idle) == processes

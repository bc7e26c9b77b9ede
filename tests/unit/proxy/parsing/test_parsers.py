"""Where a body is parsed: on the event loop, in the thread, in a process before."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import AsyncIterator

import pytest

from triptych.proxy.media.source import ImagePart
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


async def test_a_large_bodys_file_is_not_decoded_with_it(parsers: Parsers) -> None:
    url = "data:image/png;base64," + "A" * THREAD_BYTES
    raw = json.dumps({"url": url}).encode()

    def work(given: bytes) -> tuple[int, ImagePart]:
        return len(given), ImagePart.of_url(json.loads(given)["url"], "url")

    size, part = await parsers.run("", raw, Parse(os.fspath), work, few=False)
    assert size < 200
    assert part.source == b"A" * THREAD_BYTES

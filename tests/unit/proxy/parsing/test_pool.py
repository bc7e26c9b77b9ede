"""Parser processes: what they say, how they end, and whose bodies they take."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.waiting import until
from triptych.base.errors import InternalError, InvalidRequest, TooLarge
from triptych.proxy.parsing.parse import Parse
from triptych.proxy.parsing.pool import ParserPool, ParserProcess
from triptych.proxy.parsing.program import MEMORY_BYTES
from triptych.proxy.quotas.quota import Quota, QuotaSpec

SPEC = QuotaSpec("parser-processes", 2, "bodies", "processes", "", "429", wait_seconds=60.0)


def fine(raw: bytes) -> None:
    """Takes every body."""


def refuse(raw: bytes, *, word: str) -> None:
    raise InvalidRequest(f"{word} of {len(raw)} bytes is refused", param="messages[3]")


def fail(raw: bytes) -> None:
    raise LookupError("a fault of ours")


def spin(raw: bytes) -> None:
    while True:
        pass


def linger(raw: bytes, *, mark: str) -> None:
    Path(mark).touch()
    time.sleep(60.0)


def grow(raw: bytes) -> None:
    bytes(MEMORY_BYTES)


def vanish(raw: bytes) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def vanish_once(raw: bytes, *, mark: str) -> None:
    if not os.path.exists(mark):
        Path(mark).touch()
        vanish(raw)


def note(raw: bytes, *, path: str) -> None:
    """Writes down whose body it is, and takes its time."""
    with open(path, "ab") as file:
        file.write(raw[:1])
    time.sleep(0.05)


@pytest.fixture
async def quota() -> Quota:
    return Quota(SPEC)


@pytest.fixture
async def pool(quota: Quota, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ParserPool]:
    # The processes import this module's functions.
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__) + os.pathsep + _tests())
    made = ParserPool(quota, cpu_seconds=0.5)
    yield made
    await made.close()
    assert not quota.used


def _tests() -> str:
    return os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", ".."))


def here(function: Any, **options: Any) -> Parse[Any]:
    function.__module__ = "test_pool"
    return Parse(function, options)


async def pids(pool: ParserPool) -> set[int]:
    return {process.pid for process in pool._idle}


async def test_a_sound_body_passes_and_the_next_one_goes_to_the_same_process(pool: ParserPool) -> None:
    await pool.check("", bytes(3 << 20), here(fine))
    first = await pids(pool)
    await pool.check("", b"x", here(fine))
    assert await pids(pool) == first and len(first) == 1


async def test_an_error_comes_back_with_its_status_its_field_and_its_words(pool: ParserPool) -> None:
    with pytest.raises(InvalidRequest, match="a body of 5 bytes is refused") as refused:
        await pool.check("", bytes(5), here(refuse, word="a body"))
    assert (refused.value.status, refused.value.param) == (400, "messages[3]")


async def test_a_fault_of_ours_is_logged_and_named_to_nobody(pool: ParserPool, caplog: Any) -> None:
    with pytest.raises(InternalError) as failed:
        await pool.check("", b"secret", here(fail))
    assert "a fault of ours" not in failed.value.message
    assert "LookupError: a fault of ours" in caplog.text
    await pool.check("", b"", here(fine))


async def test_a_body_that_takes_too_long_is_refused_and_its_process_replaced(pool: ParserPool) -> None:
    with pytest.raises(TooLarge, match="too long to read"):
        await pool.check("", b"", here(spin))
    await pool.check("", b"", here(fine))


async def test_a_body_that_takes_too_much_memory_is_refused(pool: ParserPool) -> None:
    with pytest.raises(TooLarge, match="too much memory"):
        await pool.check("", b"", here(grow))


async def test_a_process_that_ends_amid_a_body_is_replaced_and_the_body_read_again(
    pool: ParserPool, tmp_path: Any
) -> None:
    await pool.check("", b"", here(vanish_once, mark=str(tmp_path / "mark")))


async def test_a_body_that_ends_two_processes_is_an_error_and_the_next_one_is_read(pool: ParserPool) -> None:
    with pytest.raises(InternalError, match="have ended"):
        await pool.check("", b"", here(vanish))
    await pool.check("", b"", here(fine))


async def test_a_process_that_has_died_while_it_was_idle_costs_the_next_body_nothing(
    pool: ParserPool,
) -> None:
    await pool.check("", b"", here(fine))
    (pid,) = await pids(pool)
    os.kill(pid, signal.SIGKILL)
    await pool.check("", bytes(1 << 20), here(fine))
    assert pid not in await pids(pool)


async def test_a_client_that_goes_takes_its_process_with_it(
    pool: ParserPool, quota: Quota, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    asked = asyncio.create_task(pool.check("", b"", here(linger, mark=str(mark))))
    await until(mark.exists, "the body in its process")
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert not await pids(pool) and not quota.used


async def test_a_client_that_goes_while_its_process_starts_leaves_it_to_the_next(
    pool: ParserPool, quota: Quota, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, may_start, start = asyncio.Event(), asyncio.Event(), ParserProcess.start

    async def slow(cpu_seconds: float) -> ParserProcess:
        starts.set()
        await may_start.wait()
        return await start(cpu_seconds)

    monkeypatch.setattr(ParserProcess, "start", slow)
    asked = asyncio.create_task(pool.check("", b"", here(fine)))
    await starts.wait()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert not quota.used
    may_start.set()
    await until(lambda: len(pool._idle) == 1, "the process that was on its way")


async def test_one_keys_bodies_leave_a_process_to_the_others(pool: ParserPool, tmp_path: Any) -> None:
    """The first keys that wait are served in turn, whatever one of them has queued."""
    path = str(tmp_path / "order")
    flood = [asyncio.create_task(pool.check("a", b"a", here(note, path=path))) for _ in range(12)]
    await asyncio.sleep(0)
    for who in ("b", "c"):
        await pool.check(who, who.encode(), here(note, path=path))
    await asyncio.gather(*flood)
    order = Path(path).read_text()
    assert order.count("a") == 12 and "b" in order[:3] and order.index("c") < 9


async def test_a_process_ends_with_the_one_that_has_started_it() -> None:
    process = await ParserProcess.start(1.0)
    try:
        process._socket.close()
        assert await asyncio.to_thread(process._process.wait, 30.0) == 0
    finally:
        await process.end()

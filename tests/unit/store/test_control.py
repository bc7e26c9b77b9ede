"""Commands to the store that are cancelled, its clock, and error replies to bulk transfers."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.store.address import parse_store_url
from triptych.store.bulk import (
    BulkNotServing,
    BulkRefused,
    ScatterBuffer,
    StoreMemory,
    combined,
    refusal,
    scattered,
)
from triptych.store.control import SLACK_SECONDS, Control, ServerClock


class _LosesCancellations:
    """A pipeline like `asyncio.wait_for` of Python 3.11 whose result comes together with a cancel."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    def execute_command(self, *words: Any) -> None:
        pass

    async def execute(self, raise_on_error: bool) -> list[bytes]:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return [b"PONG"]
        raise AssertionError


async def test_a_cancellation_that_comes_together_with_the_reply_is_not_lost(monkeypatch):
    control = Control(parse_store_url("unix:///nowhere"), 5.0)
    pipeline = _LosesCancellations()
    monkeypatch.setattr(control._redis, "pipeline", lambda transaction: pipeline)
    asked = asyncio.create_task(control.execute("PING"))
    await pipeline.begun.wait()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await control.close()


GIB = 1 << 30


def memory(max_bytes: int, policy: str = "volatile-lru") -> StoreMemory:
    return StoreMemory(max_bytes, max_bytes // 4, policy)


def test_equal_servers_have_the_sum() -> None:
    assert combined([(memory(GIB), 0.25)] * 4) == StoreMemory(4 * GIB, GIB, "volatile-lru")


def test_the_server_that_is_full_first_bounds_the_budget() -> None:
    assert combined([(memory(10 * GIB), 0.5), (memory(GIB), 0.5)]).max_bytes == 2 * GIB
    assert combined([(memory(10 * GIB), 0.9), (memory(GIB), 0.1)]).max_bytes == pytest.approx(10 * GIB)


def test_a_server_without_a_limit_leaves_the_store_without_one() -> None:
    assert combined([(memory(GIB), 0.5), (memory(0), 0.5)]).max_bytes == 0
    assert combined([]).max_bytes == 0


def test_one_wrong_policy_is_the_policy_of_all() -> None:
    assert combined([(memory(GIB), 0.5), (memory(GIB, "noeviction"), 0.5)]).policy == "noeviction"


def test_a_clock_that_goes_on_evenly_never_jumps() -> None:
    """Answers may be slow, the clocks may start anywhere and drift by what crystals do."""
    rng = random.Random(4)
    clock, now = ServerClock(), 0.0
    for _ in range(2000):
        now += rng.choice((0.01, 0.5, 60.0))
        reply = rng.choice((0.0, 0.001, 0.3, 4.9))
        clock.answered(1.7e9 + (now + reply * rng.random()) * (1 + 20e-6), now, now + reply)
        now += reply
    assert clock.jumps == 0


@pytest.mark.parametrize("by", [-3600.0, -2 * SLACK_SECONDS, 2 * SLACK_SECONDS, 86400.0])
def test_every_jump_counts_once(by: float) -> None:
    clock = ServerClock()
    for at in range(10):
        clock.answered(1000.0 + at + (by if at >= 5 else 0.0), at, at + 0.001)
        assert clock.jumps == (at >= 5)


def test_a_slow_reply_widens_the_bounds_and_hides_no_jump() -> None:
    clock = ServerClock()
    clock.answered(1000.0, 0.0, 0.01)
    clock.answered(1004.0, 1.0, 6.0)
    assert clock.jumps == 0
    clock.answered(1107.0, 7.0, 7.01)
    assert clock.jumps == 1


def test_the_first_answer_is_no_jump() -> None:
    clock = ServerClock()
    clock.answered(1e9, 0.0, 0.0)
    assert clock.jumps == 0


@pytest.mark.parametrize(
    ("line", "slot", "host", "port", "ask"),
    [
        (b"MOVED 3999 10.0.0.2:6381", 3999, "10.0.0.2", 6381, False),
        (b"ASK 12 node-2.example:1", 12, "node-2.example", 1, True),
        (b"MOVED 3999 ::1:6381", 3999, "::1", 6381, False),
        (b"MOVED 3999 :6381", 3999, "", 6381, False),
        (b"MOVED 1 " + b"h" * 250 + b":6381", 1, "h" * 250, 6381, False),
    ],
)
def test_a_redirect_names_the_slot_and_the_server(line, slot, host, port, ask):
    error = refusal(line)
    assert (error.slot, error.host, error.port, error.ask) == (slot, host, port, ask)


@pytest.mark.parametrize(
    "line",
    [
        b"TRYAGAIN Multiple keys request during rehashing of slot",
        b"CLUSTERDOWN Hash slot not served",
        b"LOADING Redis is loading the dataset in memory",
        b"MASTERDOWN Link with MASTER is down",
        b"READONLY You can't write against a read only replica.",
    ],
)
def test_a_server_that_cannot_answer_now_is_told_apart(line: bytes) -> None:
    assert isinstance(refusal(line), BulkNotServing)


@pytest.mark.parametrize(
    "line", [b"", b"ERR no", b"MOVED", b"MOVED x y", b"MOVED 1 host", b"ASK 1 h:p", b"\xff"]
)
def test_any_other_line_is_a_refusal(line: bytes) -> None:
    error = refusal(line)
    assert type(error) is BulkRefused
    assert len(str(refusal(b"ERR " + b"x" * 400))) < 120


def buffer_of(sizes: list[int]) -> ScatterBuffer:
    return ScatterBuffer([memoryview(bytearray(size)) for size in sizes])


@given(sizes=st.lists(st.integers(0, 9), max_size=6), seed=st.integers(0, 1 << 30))
def test_what_is_written_at_a_place_is_read_there(sizes: list[int], seed: int) -> None:
    rng, memory, plain = random.Random(seed), buffer_of(sizes), bytearray(sum(sizes))
    assert len(memory) == len(plain)
    for _ in range(8):
        start = rng.randint(0, len(plain))
        data = rng.randbytes(rng.randint(0, len(plain) - start))
        memory.write(start, data)
        plain[start : start + len(data)] = data
        stop = rng.randint(start, len(plain) + 3)
        assert memory.read(start, stop) == plain[start:stop]
    assert b"".join(memory.pieces) == plain


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
def test_the_rest_from_any_place_ends_with_its_piece(sizes: list[int]) -> None:
    memory = buffer_of(sizes)
    filled = 0
    while filled < len(memory):
        rest = memory.rest(filled)
        rest[:1] = b"x"
        filled += 1
        assert 0 < len(rest) <= 9
    assert memory.read(0, len(memory)) == b"x" * len(memory)


def test_one_piece_is_taken_as_it_is() -> None:
    memory = memoryview(bytearray(4))
    scattered(memory).write(1, b"ab")
    assert bytes(memory) == b"\0ab\0"
    pieces = buffer_of([2, 2])
    assert scattered(pieces) is pieces

"""Error replies to bulk transfers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.store.bulk import BulkNotServing, BulkRedirected, BulkRefused, ScatterBuffer, refusal, scattered


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
def test_a_redirect_names_the_slot_and_the_server(
    line: bytes, slot: int, host: str, port: int, ask: bool
) -> None:
    error = refusal(line)
    assert isinstance(error, BulkRedirected)
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

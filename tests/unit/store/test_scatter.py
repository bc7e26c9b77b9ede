"""Memory in several pieces reads and writes as one."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from triptych.store.bulk import ScatterBuffer, scattered


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

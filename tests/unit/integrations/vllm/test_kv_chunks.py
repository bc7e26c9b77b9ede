"""Transfers of the tier of vLLM's KV cache: how all of them are waited for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from triptych.base.errors import InternalError
from triptych.integrations.vllm import kv_chunks
from triptych.integrations.vllm.kv_chunks import KVChunks, parse_tier

#: Seconds after which a wait has no limit of its own.
PATIENCE = 20.0


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[KVChunks]:
    monkeypatch.setattr(kv_chunks, "_DRAIN_SECONDS", 0.05, raising=False)
    chunks = KVChunks(parse_tier({"store": "redis://127.0.0.1:1/0", "model_key": "m@1"}), "layout", 4)
    yield chunks
    chunks.close()


def drained(chunks: KVChunks) -> BaseException | None:
    """What `drain` raised."""
    raised: list[BaseException] = []

    def drain() -> None:
        try:
            chunks.drain()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it waits without a limit"
    return raised[0] if raised else None


def moves(chunks: KVChunks, move: Callable[[memoryview], object], monkeypatch: pytest.MonkeyPatch) -> None:
    async def load(plan: object, piece: memoryview) -> bool:
        return bool(await move(piece))  # type: ignore[misc]

    monkeypatch.setattr(chunks, "_load", load)


def test_transfers_that_end_are_waited_for(chunks: KVChunks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_chunks, "_DRAIN_SECONDS", PATIENCE)
    assert drained(chunks) is None, "there is none"
    gate, ended = asyncio.Event(), list[bytes]()

    async def move(piece: memoryview) -> bool:
        await gate.wait()
        return True

    moves(chunks, move, monkeypatch)
    chunks.load({b"a": memoryview(bytearray(4)), b"b": memoryview(bytearray(4))}, ended.extend)
    chunks._client.call_soon(gate.set)
    assert drained(chunks) is None
    assert ended == [b"a", b"b"]


def test_a_job_has_not_ended_before_all_of_its_pieces_have(
    chunks: KVChunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else vLLM gives away memory that is still read."""
    gate, broken, ended = asyncio.Event(), threading.Event(), list[list[bytes]]()

    async def move(piece: memoryview) -> bool:
        if piece[0]:
            broken.set()
            raise TimeoutError
        await gate.wait()
        return True

    moves(chunks, move, monkeypatch)
    chunks.load({b"b": memoryview(bytearray(4)), b"a": memoryview(bytearray(b"1234"))}, ended.append)
    assert broken.wait(PATIENCE)
    chunks._client.submit(asyncio.sleep(0)).result(PATIENCE)
    assert ended == []
    chunks._client.call_soon(gate.set)
    monkeypatch.setattr(kv_chunks, "_DRAIN_SECONDS", PATIENCE)
    assert drained(chunks) is None
    assert ended == [[b"b"]]


def test_those_that_do_not_end_are_cancelled_and_write_nothing_more(
    chunks: KVChunks, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, ended, memory = asyncio.Event(), list[list[bytes]](), bytearray(4)

    async def move(piece: memoryview) -> bool:
        await gate.wait()
        piece[:] = b"late"
        return True

    moves(chunks, move, monkeypatch)
    chunks.load({b"a": memoryview(memory)}, ended.append)
    assert drained(chunks) is None
    assert ended == [[]], "the job has failed"
    chunks._client.call_soon(gate.set)
    chunks.load({}, ended.append)
    assert drained(chunks) is None
    assert memory == bytes(4)


def test_one_that_cannot_be_cancelled_is_an_error(chunks: KVChunks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind it vLLM gives the memory to others."""
    monkeypatch.setattr(kv_chunks, "_CANCEL_SECONDS", 0.05)
    held, ended = threading.Event(), list[list[bytes]]()

    async def move(piece: memoryview) -> bool:
        held.wait()
        return True

    moves(chunks, move, monkeypatch)
    chunks.load({b"a": memoryview(bytearray(4))}, ended.append)
    try:
        assert isinstance(drained(chunks), InternalError)
    finally:
        held.set()

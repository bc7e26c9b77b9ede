"""Chunks of vLLM's KV cache in a store: what one vLLM saves, another loads, and all else is a miss."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.stores.server import StoreServer
from triptych.integrations.vllm import kv_chunks
from triptych.integrations.vllm.kv_chunks import KVChunks, Piece, parse_tier

SIZE, COUNT = 4096, 24
KEYS = [bytes([number]) * 36 for number in range(COUNT)]
#: Makes the chunks of one vLLM, which end with the test.
Make = Callable[..., KVChunks]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StoreServer]:
    server = StoreServer(tmp_path / "store")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def make(server: StoreServer) -> Iterator[Make]:
    with ExitStack() as stack:

        def made(model_key: str = "m", layout: str = "l", **options: object) -> KVChunks:
            tier = parse_tier({"store": server.url, "model_key": model_key, **options})
            chunks = KVChunks(tier, layout, SIZE)
            stack.callback(chunks.close)
            return chunks

        yield made


class Memory:
    """A primary tier of vLLM's."""

    def __init__(self, content: bytes = bytes(SIZE * COUNT)) -> None:
        self.content = bytearray(content)

    def pieces(self, keys: Sequence[bytes]) -> dict[bytes, Piece]:
        view = memoryview(self.content)
        return {key: view[at * SIZE : (at + 1) * SIZE] for at, key in enumerate(keys)}


def moved(begin: Callable[..., None], memory: Memory, keys: Sequence[bytes]) -> list[bytes]:
    """The keys of a job's chunks that have been moved."""
    done: Future[list[bytes]] = Future()
    begin(memory.pieces(keys), done.set_result)
    return done.result(20)


def test_what_one_has_saved_another_loads_byte_by_byte_and_in_any_order(make: Make) -> None:
    first, second, source = make(), make(), Memory(os.urandom(SIZE * COUNT))
    assert first.stored(KEYS) == [False] * COUNT
    assert moved(first.save, source, KEYS) == KEYS
    assert moved(first.save, source, KEYS) == KEYS, "what is there already is stored"
    assert second.stored([b"other" * 8, *KEYS]) == [False, *[True] * COUNT]
    target = Memory()
    assert moved(second.load, target, KEYS[::-1]) == KEYS[::-1]
    wanted = source.pieces(KEYS)
    assert all(piece == wanted[key] for key, piece in target.pieces(KEYS[::-1]).items())


def test_other_weights_and_another_layout_find_nothing(make: Make) -> None:
    moved(make().save, Memory(), KEYS)
    for other in (make("n"), make(layout="k")):
        assert other.stored(KEYS) == [False] * COUNT
        assert moved(other.load, Memory(), KEYS) == []


def test_of_a_job_those_that_came_are_named_and_a_damaged_one_is_deleted(
    make: Make, server: StoreServer
) -> None:
    chunks = make()
    moved(chunks.save, Memory(os.urandom(SIZE * COUNT)), KEYS[:2])
    [damaged, _] = sorted(key for key in server.call("KEYS", "kv:*") if key.endswith(b"}"))
    server.call("SETRANGE", damaged, SIZE // 2, "wrong")
    [good] = moved(make().load, Memory(), KEYS[:3])
    assert good in KEYS[:2]
    assert chunks.stored(KEYS[:3]) == [key == good for key in KEYS[:3]], "the damaged one is saved again"


def test_a_store_that_is_away_is_a_miss_and_is_asked_again_later(
    make: Make, server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = make()
    moved(chunks.save, Memory(), KEYS[:1])
    server.kill()
    assert chunks.stored(KEYS[:1]) == [False]
    assert moved(chunks.load, Memory(), KEYS) == moved(chunks.save, Memory(), KEYS) == []
    server.start()
    assert chunks.stored(KEYS[:1]) == [False], "left alone for a while"
    monkeypatch.setattr(kv_chunks.time, "monotonic", lambda: chunks._away_until)
    assert moved(chunks.save, Memory(), KEYS[:1]) == KEYS[:1]
    assert chunks.stored(KEYS[:1]) == [True]


def test_what_is_above_its_share_of_the_store_is_not_saved(make: Make, server: StoreServer) -> None:
    server.call("CONFIG", "SET", "maxmemory", str(SIZE * 90))
    chunks = make(kv_store_share=0.01)
    assert moved(chunks.save, Memory(), KEYS) == []
    assert chunks.stored(KEYS) == [False] * COUNT


def test_a_job_of_chunks_that_are_closed_ends_without_any(make: Make) -> None:
    chunks = make()
    chunks.close()
    assert moved(chunks.load, Memory(), KEYS) == []
    assert chunks.stored(KEYS) == [False] * COUNT

"""What somebody could put, or what could go wrong, under an item's key: always a miss, nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import xxhash

from support.data.items import NAMESPACE, fresh_buffer, make_body, make_plan
from triptych.store import codec, keys
from triptych.store.bulk import Loaded, Missing, SaveResult
from triptych.store.control import StoreRefused, StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore
from triptych.store.topology.location import parse_store

PLAN = make_plan(rows=64, width=128)
BODY = make_body(PLAN)
KEY = keys.embedding(PLAN.mm_hash)


def good() -> bytes:
    return codec.encode_head(PLAN, BODY, write_id="00" * 8, ttl=60) + BODY


def forged(body: bytes = BODY, *, version: int = codec.LAYOUT_VERSION, **changes: Any) -> bytes:
    """A value whose checksums are right and whose header says what an attacker wants."""
    fields = {
        "mm_hash": PLAN.mm_hash,
        "namespace": NAMESPACE,
        "modality": "image",
        "dtype": "float32",
        "shape": (64, 128),
        "nbytes": len(body),
        "rows": 64,
        "width": 128,
        "length": 64,
        "runs": None,
        "grid": (1, 2, 14),
    } | changes
    return sealed(msgpack.packb(fields), body, version=version)


def sealed(
    header: bytes, body: bytes = BODY, *, version: int = codec.LAYOUT_VERSION, parts: int = 0
) -> bytes:
    signed = codec.MAGIC + version.to_bytes(2, "little") + len(header).to_bytes(2, "little")
    signed += (60).to_bytes(4, "little") + parts.to_bytes(4, "little") + bytes(8)
    signed += xxhash.xxh3_64_digest(signed + header)
    padding = bytes(-(48 + len(header)) % 64)
    return signed + xxhash.xxh3_128_digest(signed + header + padding + body) + header + padding + body


def flipped(at: int) -> bytes:
    value = bytearray(good())
    value[at] ^= 1
    return bytes(value)


def nested(depth: int) -> bytes:
    return sealed(b"\x91" * depth + b"\xc0")


DAMAGES: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "truncated in the prefix": lambda: good()[:20],
    "truncated in the header": lambda: good()[:60],
    "truncated in the body": lambda: good()[:-1],
    "a byte too many": lambda: good() + b"x",
    "far too long": lambda: good() + bytes(1 << 20),
    "pickle bytes": lambda: (
        b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."
    ),
    "random bytes": lambda: os.urandom(len(good())),
    "old layout version": lambda: forged(version=0),
    "next layout version": lambda: forged(version=2),
    "bit flipped in the body": lambda: flipped(-1000),
    "last bit flipped": lambda: flipped(-1),
    "bit flipped in the header": lambda: flipped(100),
    "bit flipped in the magic": lambda: flipped(0),
    "bit flipped in the header's length": lambda: flipped(6),
    "bit flipped in the write id": lambda: flipped(17),
    "bit flipped in the padding": lambda: flipped(len(good()) - len(BODY) - 1),
    "unknown dtype": lambda: forged(dtype="object"),
    "another dtype of the same size": lambda: forged(dtype="float16", shape=(64, 256), width=256),
    "dtype is no text": lambda: forged(dtype=7),
    "nbytes overflow": lambda: forged(shape=(1 << 62, 8), rows=1 << 62, width=8),
    "nbytes not the product": lambda: forged(nbytes=len(BODY) + 4),
    "huge ndim": lambda: forged(shape=(1,) * 2000),
    "five dimensions": lambda: forged(shape=(64, 128, 1, 1, 1)),
    "three dimensions": lambda: forged(shape=(64, 128, 1)),
    "negative dimensions": lambda: forged(shape=(-64, -128)),
    "a dimension that is a boolean": lambda: forged(shape=(64, True)),
    "other rows than planned": lambda: forged(shape=(32, 256), rows=32, width=256, length=32),
    "another item's hash": lambda: forged(mm_hash="f" * 64),
    "another model's namespace": lambda: forged(namespace="another"),
    "more placeholders than rows": lambda: forged(length=1 << 30),
    "runs outside the span": lambda: forged(runs=[10, 64]),
    "runs that overlap": lambda: forged(runs=[0, 40, 20, 24]),
    "runs of an odd count": lambda: forged(runs=[0, 64, 3]),
    "negative runs": lambda: forged(runs=[-1, 64]),
    "runs that are no list": lambda: forged(runs="0:64"),
    "a field too many": lambda: forged(code="import os"),
    "no map at all": lambda: sealed(msgpack.packb([1, 2, 3])),
    "a map with other keys than text": lambda: sealed(msgpack.packb({1: 2})),
    "an extension type": lambda: sealed(msgpack.packb({"mm_hash": msgpack.ExtType(5, b"x")})),
    "deeply nested msgpack": lambda: nested(4000),
    "an announced array of 2**32 - 1": lambda: sealed(b"\xdd\xff\xff\xff\xff"),
    "an announced text of 4 GiB": lambda: sealed(b"\xdb\xff\xff\xff\xff"),
    "invalid utf-8": lambda: sealed(b"\x81\xa2\xff\xfe\x01"),
    "parts that are not there": lambda: sealed(good()[48:300], parts=3),
    "2**32 - 1 parts": lambda: sealed(good()[48:300], parts=(1 << 32) - 1),
}


#: What a look-up cannot see, which reads heads alone.
BEHIND_THE_HEAD = {
    *(
        "truncated in the body",
        "a byte too many",
        "far too long",
        "bit flipped in the body",
        "last bit flipped",
    ),
    *("bit flipped in the padding", "other rows than planned", "another dtype of the same size"),
}


@pytest.mark.parametrize("name", sorted(DAMAGES))
async def test_a_damaged_value_is_missing_and_is_replaced_by_a_save_that_names_it(store, name):
    value = DAMAGES[name]()
    await store.control.execute("SET", KEY, value, "PX", 60000)
    if name not in BEHIND_THE_HEAD:
        assert await store.look_up([(PLAN.mm_hash, NAMESPACE)]) == [None]
    missing = await store.load(PLAN, fresh_buffer)
    assert isinstance(missing, Missing)
    assert missing.reason
    if value:
        assert missing.damaged_digest == hashlib.sha1(value[:4096]).hexdigest()
        result = await store.save(PLAN, BODY, ttl=60, damaged_digest=missing.damaged_digest)
        assert result is SaveResult.REPLACED
        loaded = await store.load(PLAN, fresh_buffer)
        assert isinstance(loaded, Loaded)
        assert bytes(loaded.body) == BODY


@pytest.mark.parametrize("nbytes", [1, 2], ids=["in one piece", "in parts"])
async def test_a_key_of_another_kind_is_replaced_by_a_save_that_names_it_and_hides_no_other_item(
    store: EmbeddingStore, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if nbytes > 1:
        monkeypatch.setattr(codec, "PART_BYTES", PLAN.nbytes // 2)
    other = dataclasses.replace(PLAN, mm_hash="f" * 64)
    await store.save(other, BODY, ttl=60)
    await store.control.execute("RPUSH", KEY, "a")
    wanted = [(PLAN.mm_hash, NAMESPACE), (other.mm_hash, NAMESPACE)]
    assert await store.look_up(wanted) == [None, other]
    assert await store.save(PLAN, BODY, ttl=60) is SaveResult.ALREADY  # nothing names it yet
    missing = await store.load(PLAN, fresh_buffer)
    assert isinstance(missing, Missing)
    result = await store.save(PLAN, BODY, ttl=60, damaged_digest=missing.damaged_digest)
    assert result is SaveResult.REPLACED
    assert isinstance(await store.load(PLAN, fresh_buffer), Loaded)


async def test_the_digest_of_no_bytes_deletes_no_value(store: EmbeddingStore) -> None:
    await store.save(PLAN, BODY, ttl=60)
    nothing = hashlib.sha1(b"").hexdigest()
    assert await store.save(PLAN, BODY, ttl=60, damaged_digest=nothing) is SaveResult.ALREADY
    await store.control.execute("DEL", KEY)
    assert await store.save(PLAN, BODY, ttl=60, damaged_digest=nothing) is SaveResult.STORED


async def test_a_save_that_names_another_damage_keeps_the_value_and_answers_already(store):
    await store.save(PLAN, BODY, ttl=60)
    result = await store.save(PLAN, BODY, ttl=60, damaged_digest=hashlib.sha1(b"other").hexdigest())
    assert result is SaveResult.ALREADY
    assert isinstance(await store.load(PLAN, fresh_buffer), Loaded)


async def test_of_many_encoders_that_replace_one_damage_one_writes_and_all_see_a_good_value(store):
    await store.control.execute("SET", KEY, DAMAGES["bit flipped in the body"](), "PX", 60000)
    missing = await store.load(PLAN, fresh_buffer)
    assert isinstance(missing, Missing)
    results = await asyncio.gather(
        *(store.save(PLAN, BODY, ttl=60, damaged_digest=missing.damaged_digest) for _ in range(8))
    )
    assert results.count(SaveResult.ALREADY) == 7
    assert isinstance(await store.load(PLAN, fresh_buffer), Loaded)


async def test_a_value_replaced_while_it_is_read_arrives_whole(store: EmbeddingStore) -> None:
    plan = make_plan("large", rows=4096, width=1024)
    key = keys.embedding(plan.mm_hash)
    bodies = [make_body(plan, seed) for seed in (1, 2)]
    values = [codec.encode_head(plan, body, write_id="00" * 8, ttl=60) + body for body in bodies]
    await store.control.execute("SET", key, values[0], "PX", 60000)
    replacements: list[asyncio.Task[Any]] = []

    def into(nbytes: int) -> memoryview:
        replacements.append(asyncio.create_task(store.control.execute("SET", key, values[1], "PX", 60000)))
        return memoryview(bytearray(nbytes))

    loaded = await store.load(plan, into)
    await asyncio.gather(*replacements)
    assert isinstance(loaded, Loaded)
    assert bytes(loaded.body) == bodies[0]
    again = await store.load(plan, fresh_buffer)
    assert isinstance(again, Loaded)
    assert bytes(again.body) == bodies[1]


@pytest.mark.parametrize(
    "reply",
    [
        b"-MOVED 1234 10.0.0.1:6379\r\n",
        b"-ASK 1234 10.0.0.1:6379\r\n",
        b"+OK\r\n",
        b":1\r\n",
        b"*1\r\n$1\r\na\r\n",
        b"$-2\r\n",
        b"$99999999999999999999\r\n",
        b"$4\r\nabcdefgh\r\n",
        b"HTTP/1.1 200 OK\r\n" * 40,
        b"x" * 5000,
    ],
)
async def test_a_server_that_answers_a_get_otherwise_is_a_miss_and_its_connection_is_closed(
    store: EmbeddingStore, tmp_path: Path, reply: bytes
) -> None:
    async with answering(store, tmp_path, reply) as (other, closed):
        assert isinstance(await other.load(PLAN, fresh_buffer), Missing)
        await asyncio.wait_for(closed.wait(), 45)


@pytest.mark.parametrize("reply", [b"-NOAUTH Authentication required.\r\n", b"-NOPERM no permission\r\n"])
async def test_a_server_that_refuses_a_get_is_no_miss_as_the_item_would_be_encoded_for_ever(
    store: EmbeddingStore, tmp_path: Path, reply: bytes
) -> None:
    async with answering(store, tmp_path, reply) as (other, closed):
        with pytest.raises(StoreRefused):
            await other.load(PLAN, fresh_buffer)
        await asyncio.wait_for(closed.wait(), 45)


async def greeted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers the SELECT that every connection begins with."""
    await reader.readuntil(b"SELECT\r\n$1\r\n0\r\n")
    writer.write(b"+OK\r\n")


@contextlib.asynccontextmanager
async def answering(
    store: EmbeddingStore, folder: Path, reply: bytes
) -> AsyncIterator[tuple[EmbeddingStore, asyncio.Event]]:
    """(a store whose bulk connections get this reply to every GET, whether one was closed since)."""
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greeted(reader, writer)
        await reader.readuntil(b"ec:")
        writer.write(reply)
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
        closed.set()
        writer.close()

    server = await asyncio.start_unix_server(serve, str(folder / "s.sock"))
    other = EmbeddingStore(parse_store(f"unix://{folder / 's.sock'}"), timeout=5)
    other.control = store.control
    try:
        yield other, closed
    finally:
        server.close()
        await server.wait_closed()


async def test_a_connection_that_ends_inside_a_value_is_an_absence_and_the_next_load_is_right(
    store: EmbeddingStore, tmp_path: Path
) -> None:
    plan = make_plan("eighty megabytes", rows=20, width=1 << 20)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greeted(reader, writer)
        await reader.readuntil(b"ec:")
        writer.write(b"$4096\r\n" + bytes(100))
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, str(tmp_path / "s.sock"))
    other = EmbeddingStore(parse_store(f"unix://{tmp_path / 's.sock'}"), timeout=5)
    try:
        with pytest.raises(StoreUnavailable, match="broke"):
            await other.load(plan, fresh_buffer)
    finally:
        server.close()
        await server.wait_closed()
        await other.close()
    body = make_body(plan)
    await store.save(plan, body, ttl=60)
    loaded = await store.load(plan, fresh_buffer)
    assert isinstance(loaded, Loaded)
    assert bytes(loaded.body) == body

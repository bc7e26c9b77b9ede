"""Bytes under an item's key, in the registry and on the store's connection: a miss, never an exception."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgpack
import xxhash
from hypothesis import strategies as st

from support.data.items import NAMESPACE, fresh_buffer, make_body, make_plan
from support.hostile.fuzzing import Fuzzer, json_values, mutate, mutated, randoms
from triptych.base.types import DTYPE_BYTES, ItemPlan, WorkerInfo
from triptych.registry.registry import _pack, _unpack
from triptych.store import codec
from triptych.store.bulk import BulkError, ValueTooLarge
from triptych.store.bulk_reader import ArrivingValue, BulkReader
from triptych.store.codec import Damage, Head, decode_head, encode_head, verify

PLAN = make_plan(rows=4, width=16)
BODY = make_body(PLAN)
VALUE = encode_head(PLAN, BODY, write_id="00" * 8, ttl=60) + BODY
FIELDS: dict[str, Any] = {
    "mm_hash": PLAN.mm_hash,
    "namespace": NAMESPACE,
    "modality": "image",
    "dtype": "float32",
    "shape": (4, 16),
    "nbytes": len(BODY),
    "rows": 4,
    "width": 16,
    "length": 4,
    "runs": None,
    "grid": (1, 2, 2),
}
NUMBERS = st.sampled_from((-1, 0, 1, 2, 4, 16, 255, 1 << 31, 1 << 40, (1 << 64) - 1)) | st.booleans()


def read(value: bytes) -> None:
    """As a look-up and as a load read it: a head that holds together, or a damage."""
    head = decode_head(value, mm_hash=PLAN.mm_hash, namespace=NAMESPACE)
    if isinstance(head, Head):
        assert_sound(head.plan)
        found = verify(head, [value[head.body_offset :]])
        assert found is None or found.reason
    else:
        assert head.reason
    if value:
        arriving = ArrivingValue(memoryview(bytearray(value)), mm_hash=PLAN.mm_hash, namespace=NAMESPACE)
        for filled in range(0, len(value), 97):
            arriving.feed(filled)
        assert isinstance(arriving.result(), Head | Damage)


def assert_sound(plan: ItemPlan) -> None:
    assert plan.nbytes == plan.rows * plan.width * DTYPE_BYTES[plan.dtype] <= 1 << 40
    assert plan.runs is None or sum(count for _, count in plan.runs) == plan.rows


def sealed(header: bytes, body: bytes, parts: int) -> bytes:
    """A value whose checksums are right, whatever its header says."""
    signed = codec.MAGIC + (1).to_bytes(2, "little") + len(header).to_bytes(2, "little")
    signed += (60).to_bytes(4, "little") + parts.to_bytes(4, "little") + bytes(8)
    signed += xxhash.xxh3_64_digest(signed + header)
    padding = bytes(-(48 + len(header)) % 64)
    return signed + xxhash.xxh3_128_digest(signed + header + padding + body) + header + padding + body


def forged(changes: dict[str, Any], extra: bytes, parts: int, rng: random.Random) -> bytes:
    header = msgpack.packb(FIELDS | changes)
    if rng.random() < 0.3:
        header = mutate(header, rng, [header])[:4000]
    return sealed(header[:4000], BODY + extra, parts)


def test_mutated_values_are_read_or_missing(fuzzer: Fuzzer) -> None:
    fuzzer.run("stored values, mutated", mutated([VALUE]), read, 200)


def test_values_with_right_checksums_and_wrong_headers_are_read_or_missing(fuzzer: Fuzzer) -> None:
    packable = st.one_of(
        NUMBERS,
        st.lists(NUMBERS, max_size=5),
        st.text(max_size=4),
        st.sampled_from(sorted(DTYPE_BYTES)),
        st.binary(max_size=4),
        st.floats(),
    )
    changes = st.dictionaries(st.sampled_from([*FIELDS, "other"]), packable, max_size=3)
    values = st.builds(
        forged,
        changes,
        st.sampled_from([b"", b"x"]),
        st.sampled_from([0, 0, 0, 1, 7, (1 << 32) - 1]),
        randoms(),
    )
    fuzzer.run("stored values, forged", values, read, 120)


def test_registrations_are_read_or_passed_over(fuzzer: Fuzzer) -> None:
    info = WorkerInfo("127.0.0.1:1", "pd", "i", "k" * 64, "m", ("n" * 64,), {"plan_credit": 4})
    good = b"i\n" + _pack(info)
    names = st.sampled_from(
        ["address", "pool", "incarnation", "model_key", "model", "namespaces", "capacity"]
    )
    odd = st.dictionaries(names | st.text(max_size=4), json_values(), max_size=8).map(pack_or_empty)

    def unpack(raw: bytes) -> None:
        found = _unpack(raw)
        assert found is None or isinstance(found.address, str)

    fuzzer.run("registrations", mutated([good]) | odd, unpack, 100)


def pack_or_empty(value: Any) -> bytes:
    try:
        return b"i\n" + bytes(msgpack.packb(value))
    except (OverflowError, ValueError):
        return b"i\n"


def test_any_reply_to_a_get_is_a_value_of_the_right_size_or_an_error(fuzzer: Fuzzer) -> None:
    pieces = [b"$4\r\n", b"abcd", b"\r\n", b"$-1\r\n", b"$0\r\n", b"+OK\r\n", b"-ERR x\r\n", b":1\r\n"]
    pieces += [b"*1\r\n", b"$99999999999999999999\r\n", b"$+4\r\n", b"_\r\n", b"\n", b"\r"]
    replies = st.lists(st.sampled_from(pieces) | st.binary(max_size=40), min_size=1, max_size=6)
    with asyncio.Runner() as runner:

        async def exchange(pieces: list[bytes]) -> None:
            reader = BulkReader()
            reader.connection_made(_Deaf())
            asked = asyncio.ensure_future(reader.get("key", _small))
            await asyncio.sleep(0)
            for piece in pieces:
                while piece and not asked.done():
                    buffer = reader.get_buffer(-1)
                    count = min(len(buffer), len(piece))
                    buffer[:count] = piece[:count]
                    piece = piece[count:]
                    reader.buffer_updated(count)
            reader.connection_lost(None)
            try:
                value = await asked
            except BulkError:
                assert not reader.usable
            else:
                assert value is None or len(value) <= 64

        fuzzer.run("store replies", replies, lambda pieces: runner.run(exchange(pieces)), 80)


def _small(nbytes: int) -> memoryview:
    if nbytes > 64:
        raise ValueTooLarge("too large")
    return fresh_buffer(nbytes)


class _Deaf(asyncio.Transport):
    """A connection that takes everything and says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._closing = False

    def write(self, data: Any) -> None:
        pass

    def is_closing(self) -> bool:
        return self._closing

    def abort(self) -> None:
        self._closing = True

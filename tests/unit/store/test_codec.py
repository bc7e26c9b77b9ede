"""What a value's head holds: the plan, checksums, the producer; every damage of it is found."""

from __future__ import annotations

import dataclasses
import random
import struct

import msgpack
import pytest
import xxhash

from support.data.items import NAMESPACE, make_body, make_plan
from triptych.base.errors import InvalidRequest
from triptych.base.types import ItemPlan
from triptych.store.codec import (
    ALIGNMENT,
    HEAD_BYTES,
    PART_BYTES,
    PRODUCER_BYTES,
    Damage,
    Head,
    decode_head,
    encode_head,
    part_count,
    verify,
)

WRITE_ID = "0123456789abcdef"
PRODUCER = bytes(range(1, PRODUCER_BYTES + 1))


def encoded(plan: ItemPlan, body: bytes) -> bytes:
    return encode_head(plan, body, write_id=WRITE_ID, ttl=60)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("runs", [None, ((0, 3), (5, 4))])
@pytest.mark.parametrize("layout", [(), (0, 0, 0, 0, 9, 7)])
def test_a_head_is_decoded_to_the_plan_that_was_stored(dtype, runs, layout):
    plan = dataclasses.replace(
        make_plan(dtype=dtype), runs=runs, length=7 if runs is None else 9, layout=layout
    )
    body = make_body(plan)
    raw = encoded(plan, body)
    head = decode_head(raw + body, mm_hash=plan.mm_hash, namespace=NAMESPACE)
    assert (head.plan, head.write_id, head.ttl, head.parts) == (plan, WRITE_ID, 60, 0)
    assert head.body_offset == len(raw)
    assert len(raw) % ALIGNMENT == 0
    assert len(raw) <= HEAD_BYTES
    assert verify(head, [body]) is None
    assert verify(head, [body[:100], body[100:]]) is None


def test_a_head_of_rows_in_8_bits_has_their_scales_and_earlier_readers_refuse_it() -> None:
    plan = dataclasses.replace(make_plan(dtype="int8"), scales=4)
    body = make_body(plan)
    raw = encoded(plan, body)
    head = decode_head(raw + body, mm_hash=plan.mm_hash, namespace=NAMESPACE)
    assert isinstance(head, Head) and head.plan == plan and verify(head, [body]) is None
    fields = msgpack.unpackb(raw[48 : 48 + int.from_bytes(raw[6:8], "little")])
    # Theirs are `float32`, `float16` and `bfloat16`, and this field they do not know.
    assert (fields["dtype"], fields["scales"]) == ("int8", 4)
    plain = encoded(make_plan(), make_body(make_plan()))
    assert "scales" not in msgpack.unpackb(plain[48 : 48 + int.from_bytes(plain[6:8], "little")])


@pytest.mark.parametrize("dtype, scales", [("int8", 0), ("int8", 5), ("bfloat16", 2)])
def test_scales_that_do_not_fit_cannot_be_stored(dtype: str, scales: int) -> None:
    plan = dataclasses.replace(make_plan(dtype=dtype), scales=scales)
    with pytest.raises(InvalidRequest, match="scales that do not fit"):
        encoded(plan, make_body(plan))


@pytest.mark.parametrize("producer", [None, PRODUCER], ids=["no producer", "a producer"])
def test_every_single_flipped_bit_is_found(producer: bytes | None) -> None:
    plan = make_plan(rows=2, width=8)
    body = make_body(plan)
    extra = {} if producer is None else {"producer": producer}
    value = encode_head(plan, body, write_id=WRITE_ID, ttl=60, **extra) + body
    for at in range(len(value)):
        broken = bytearray(value)
        broken[at] ^= 1 << (at % 8)
        head = decode_head(broken, mm_hash=plan.mm_hash, namespace=NAMESPACE)
        found = head if isinstance(head, Damage) else verify(head, [broken[head.body_offset :]])
        assert isinstance(found, Damage), f"bit of byte {at}"


def test_random_and_cut_bytes_are_damage_and_never_an_exception() -> None:
    plan = make_plan(rows=2, width=8)
    value = encoded(plan, make_body(plan))
    rng = random.Random(0)
    for _ in range(3000):
        raw = bytearray(value[: rng.randrange(len(value) + 1)])
        for _ in range(rng.randrange(1, 6)):
            if raw:
                raw[rng.randrange(len(raw))] = rng.randrange(256)
        head = decode_head(bytes(raw), mm_hash=plan.mm_hash, namespace=NAMESPACE)
        assert isinstance(head, Damage) or head.plan == plan


def test_bodies_above_64_mib_are_cut_into_parts() -> None:
    assert part_count(PART_BYTES) == 0
    assert part_count(PART_BYTES + 1) == 2
    assert part_count(3 * PART_BYTES) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"runs": ((0, 3),)},
        {"runs": ((0, 3), (2, 4))},
        {"runs": ((0, 7), (9, 0))},
        {"length": 8},
        {"grid_thw": (-1, 2, 3)},
        {"layout": (0, -1)},
    ],
)
def test_plans_that_no_reader_would_take_are_refused_at_the_writer(changes: dict[str, object]) -> None:
    plan = dataclasses.replace(make_plan(), **changes)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="plan"):
        encoded(plan, make_body(plan))


def test_a_cross_attention_item_has_rows_and_no_span() -> None:
    plan = dataclasses.replace(make_plan(), length=0)
    head = decode_head(encoded(plan, make_body(plan)), mm_hash=plan.mm_hash, namespace=NAMESPACE)
    assert head.plan == plan


def plans() -> list[ItemPlan]:
    """Plans whose headers have every length modulo 64."""
    base = make_plan(rows=4, width=8)
    return [dataclasses.replace(base, modality="image" + "e" * extra) for extra in range(70)]


def head_of(value: bytes, plan: ItemPlan) -> Head:
    return decode_head(value, mm_hash=plan.mm_hash, namespace=NAMESPACE)  # type: ignore[return-value]


def test_a_producer_comes_back_whatever_the_headers_length() -> None:
    for plan in plans():
        body = make_body(plan)
        raw = encode_head(plan, body, write_id=WRITE_ID, ttl=60, producer=PRODUCER)
        head = head_of(raw + body, plan)
        assert (head.plan, head.producer, head.body_offset) == (plan, PRODUCER, len(raw))
        assert len(raw) % ALIGNMENT == 0
        assert verify(head, [body]) is None


def test_a_value_without_a_producer_is_byte_for_byte_as_before() -> None:
    for plan in plans():
        body = make_body(plan)
        raw = encode_head(plan, body, write_id=WRITE_ID, ttl=60)
        assert head_of(raw + body, plan).producer == b""
        length = int.from_bytes(raw[6:8], "little")
        assert raw[48 + length :] == bytes(len(raw) - 48 - length)
        assert len(raw) - 48 - length < ALIGNMENT


def read_as_before_producers(value: bytes) -> dict[str, object]:
    """What a reader of layout 1 does that has never heard of producers; AssertionError for damage."""
    magic, version, length, _, parts, _, header_sum, checksum = struct.unpack_from("<4sHHII8s8s16s", value)
    header = value[48 : 48 + length]
    assert (magic, version, parts) == (b"3EC\x93", 1, 0)
    assert xxhash.xxh3_64_digest(value[:24] + header) == header_sum
    fields = msgpack.unpackb(
        header, strict_map_key=True, max_str_len=512, max_bin_len=0, max_ext_len=0, max_map_len=11
    )
    end = 48 + length
    end += -end % 64
    assert len(value) == end + fields["nbytes"]
    assert xxhash.xxh3_128_digest(value[:32] + value[48:]) == checksum
    return dict(fields)


def test_a_reader_from_before_finds_no_damage_and_the_same_fields() -> None:
    for plan in plans():
        body = make_body(plan)
        with_producer, without = (
            encode_head(plan, body, write_id=WRITE_ID, ttl=60, producer=producer) + body
            for producer in (PRODUCER, b"")
        )
        assert read_as_before_producers(with_producer) == read_as_before_producers(without)


@pytest.mark.parametrize("size", [1, PRODUCER_BYTES - 1, PRODUCER_BYTES + 1, 4096])
def test_bytes_of_another_size_are_left_out(size: int) -> None:
    plan = make_plan(rows=2, width=8)
    body = make_body(plan)
    plain = encode_head(plan, body, write_id=WRITE_ID, ttl=60)
    assert encode_head(plan, body, write_id=WRITE_ID, ttl=60, producer=b"x" * size) == plain


def test_a_header_that_fills_its_room_is_stored_without_its_producer() -> None:
    """Never refused for the sake of a trace."""
    left_out = 0
    for count in range(940, 1024):
        runs = tuple((5 * index, 1) for index in range(count))
        plan = dataclasses.replace(
            make_plan(rows=count, width=1), runs=runs, length=5 * count, rows=count, width=1
        )
        body = make_body(plan)
        try:
            plain = encode_head(plan, body, write_id=WRITE_ID, ttl=60)
        except InvalidRequest as error:
            assert "must fit" in str(error)
            break
        raw = encode_head(plan, body, write_id=WRITE_ID, ttl=60, producer=PRODUCER)
        assert len(raw) <= HEAD_BYTES
        head = head_of(raw + body, plan)
        assert head.plan == plan
        left_out += head.producer == b""
        if head.producer == b"":
            assert raw == plain
    else:
        raise AssertionError("no header was too long")
    assert left_out > 0


def test_random_padding_is_never_taken_for_more_than_it_is() -> None:
    rng = random.Random(1)
    plan = make_plan(rows=2, width=8)
    body = make_body(plan)
    raw = bytearray(encode_head(plan, body, write_id=WRITE_ID, ttl=60))
    length = int.from_bytes(raw[6:8], "little")
    for _ in range(200):
        raw[48 + length :] = rng.randbytes(len(raw) - 48 - length)
        head = decode_head(bytes(raw), mm_hash=plan.mm_hash, namespace=NAMESPACE)
        assert len(head.producer) in (0, PRODUCER_BYTES)

from __future__ import annotations

import dataclasses
import random

import pytest

from support.data.items import NAMESPACE, make_body, make_plan
from triptych.base.errors import InvalidRequest
from triptych.base.types import ItemPlan
from triptych.store.codec import (
    ALIGNMENT,
    HEAD_BYTES,
    PART_BYTES,
    Damage,
    Head,
    decode_head,
    encode_head,
    part_count,
    verify,
)

WRITE_ID = "0123456789abcdef"


def encoded(plan: ItemPlan, body: bytes) -> bytes:
    return encode_head(plan, body, write_id=WRITE_ID, ttl=60)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("runs", [None, ((0, 3), (5, 4))])
@pytest.mark.parametrize("layout", [(), (0, 0, 0, 0, 9, 7)])
def test_a_head_is_decoded_to_the_plan_that_was_stored(
    dtype: str, runs: tuple[tuple[int, int], ...] | None, layout: tuple[int, ...]
) -> None:
    plan = dataclasses.replace(
        make_plan(dtype=dtype), runs=runs, length=7 if runs is None else 9, layout=layout
    )
    body = make_body(plan)
    raw = encoded(plan, body)
    head = decode_head(raw + body, mm_hash=plan.mm_hash, namespace=NAMESPACE)
    assert isinstance(head, Head)
    assert (head.plan, head.write_id, head.ttl, head.parts) == (plan, WRITE_ID, 60, 0)
    assert head.body_offset == len(raw)
    assert len(raw) % ALIGNMENT == 0
    assert len(raw) <= HEAD_BYTES
    assert verify(head, [body]) is None
    assert verify(head, [body[:100], body[100:]]) is None


def test_every_single_flipped_bit_is_found() -> None:
    plan = make_plan(rows=2, width=8)
    body = make_body(plan)
    value = encoded(plan, body) + body
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
    assert isinstance(head, Head)
    assert head.plan == plan

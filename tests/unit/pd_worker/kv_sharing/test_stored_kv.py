"""Groups of blocks, their keys and their namespace."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from triptych.pd_worker.kv_sharing import stored_kv
from triptych.pd_worker.kv_sharing.stored_kv import GROUP_BYTES, StoredKV
from triptych.store import codec

SIZES: dict[str, Any] = {"block_size": 16, "width": 2048, "dtype": "float32", "shapes": [(2, 16, 2, 32)]}


def digests(count: int) -> list[bytes]:
    return [hashlib.sha256(str(n).encode()).digest() for n in range(count)]


def test_groups_end_at_multiples_of_sixteen_blocks_and_where_the_blocks_end() -> None:
    form = StoredKV("model", **SIZES)
    assert [(g.start, g.end) for g in form.groups(digests(37))] == [(0, 16), (16, 32), (32, 37)]
    assert [(g.start, g.end) for g in form.groups(digests(37), first=20)] == [(16, 32), (32, 37)]
    assert form.groups([]) == []


def test_a_group_is_named_by_its_last_block_alone() -> None:
    form, all_digests = StoredKV("model", **SIZES), digests(37)
    assert form.groups(all_digests)[1] == form.groups(all_digests[:32])[1]
    keys = [group.plan.mm_hash for group in form.groups(all_digests)]
    keys += [group.plan.mm_hash for group in form.shorter(all_digests, form.groups(all_digests)[2])]
    keys += [form.state(digest).mm_hash for digest in all_digests]
    assert len(set(keys)) == 3 + 4 + 37


def test_what_a_group_begins_with_is_named_from_the_longest_on() -> None:
    form, all_digests = StoredKV("model", **SIZES), digests(37)
    last = form.groups(all_digests)[-1]
    assert [(g.start, g.end) for g in form.shorter(all_digests, last)] == [(32, n) for n in (36, 35, 34, 33)]


def test_plans_can_be_stored_and_have_the_bytes_of_their_blocks() -> None:
    form = StoredKV("model", state_bytes=1024, **SIZES)
    for group in form.groups(digests(20)):
        codec.check_plan(group.plan)
        assert group.plan.nbytes == (group.end - group.start) * form.block_bytes
    codec.check_plan(form.state(digests(1)[0]))
    assert form.state(digests(1)[0]).nbytes == 1024


def test_large_blocks_make_smaller_groups() -> None:
    form = StoredKV("model", **{**SIZES, "width": 4 << 20})
    assert form.group_blocks == GROUP_BYTES // form.block_bytes == 2
    assert StoredKV("model", **{**SIZES, "width": 64 << 20}).group_blocks == 1


@pytest.mark.parametrize(
    "other",
    [
        {"model_key": "another"},
        {"block_size": 32},
        {"width": 4096},
        {"dtype": "bfloat16"},
        {"shapes": [(2, 16, 4, 16)]},
        {"state_bytes": 8},
        {"ranks": 2},
    ],
    ids=str,
)
def test_another_model_layout_dtype_or_rank_count_has_other_keys(other: dict[str, Any]) -> None:
    form, foreign = (StoredKV(**{"model_key": "model", **SIZES, **more}) for more in ({}, other))
    assert form.namespace != foreign.namespace
    (mine,), (theirs,) = form.groups(digests(1)), foreign.groups(digests(1))
    assert mine.plan.mm_hash != theirs.plan.mm_hash


@pytest.mark.parametrize("version", ["FORM_VERSION", "LAYOUT_VERSION"])
def test_another_version_of_the_form_or_of_the_kernels_layout_has_other_keys(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = StoredKV("model", **SIZES).namespace
    monkeypatch.setattr(stored_kv, version, getattr(stored_kv, version) + 1)
    assert StoredKV("model", **SIZES).namespace != mine

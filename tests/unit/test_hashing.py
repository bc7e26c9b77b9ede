"""One key: nothing that changes an embedding may leave it unchanged, and nothing else may change it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import msgpack
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from support.engine.engine_requests import make_feature
from support.hostile.fuzzing import json_values
from triptych.base.errors import InvalidRequest
from triptych.base.hashing import (
    _sorted,
    canonical,
    check_mm_hash,
    framed_digest,
    mm_hash,
    prefix_root,
    tenant_digest,
)
from triptych.pd_worker.core.kv_cache.block_pool import PrefixChain

BASE = {"media": b"bytes", "namespace": "n", "modality": "image", "processor_options": {"a": 1}, "salt": "s"}


def _key(**changes: object) -> str:
    fields = BASE | changes
    return mm_hash(fields.pop("media"), **fields)


@pytest.mark.parametrize(
    "change",
    [
        {"media": b"byteS"},
        {"namespace": "m"},
        {"modality": "audio"},
        {"processor_options": {"a": 2}},
        {"processor_options": {"a": "1"}},
        {"processor_options": {}},
        {"processor_options": {"a": None}},
        {"processor_options": {"a": [1]}},
        {"processor_options": {"a": {"b": 1}}},
        {"processor_options": {"a.b": 1}},
        {"salt": ""},
    ],
)
def test_every_field_changes_the_key(change):
    assert _key(**change) != _key()


def test_the_order_of_options_does_not_change_the_key():
    assert _key(processor_options={"a": 1, "b": 2}) == _key(processor_options={"b": 2, "a": 1})


def test_a_key_is_the_one_that_earlier_releases_made():
    options = {
        "b": [1, -5, 70000, 1 << 40, -(1 << 40), 0.5, None, True, "ä" * 40],
        "a": {"z": 1, "y": "x" * 300},
    }
    assert _key(processor_options=options) == (
        "6f6ec6645178fcb6cffe8f0a27dfff1cf3f14b9cba43faa5b50cf4bc6624ef49"
    )


@given(st.dictionaries(st.text(), json_values()))
def test_options_have_the_bytes_of_msgpack(options: dict[str, Any]) -> None:
    try:
        expected = msgpack.packb(_sorted(options))
    except (OverflowError, ValueError):  # numbers above 64 bits, halves of characters
        assume(False)
    assert canonical(options) == expected


def test_bytes_cannot_move_from_one_field_to_the_next():
    assert framed_digest([("a", b"xy"), ("b", b"z")]) != framed_digest([("a", b"x"), ("b", b"yz")])
    assert framed_digest([("ab", b"")]) != framed_digest([("a", b"b")])


def test_a_key_is_the_same_in_every_process():
    code = "from triptych.base.hashing import mm_hash; print(mm_hash(b'x', namespace='n', modality='image'))"
    keys = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            text=True,
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(keys) == 1


@pytest.mark.parametrize(
    "value", ["", "0" * 63, "0" * 65, "g" * 64, "A" * 64, "../" + "0" * 61, "0" * 63 + "\n"]
)
def test_anything_but_64_hex_characters_is_refused(value):
    with pytest.raises(InvalidRequest, match="mm_hash"):
        check_mm_hash(value)


def test_tenants_and_models_share_no_prefix_root():
    roots = {prefix_root("m", "a"), prefix_root("m", "b"), prefix_root("n", "a"), prefix_root("ma", "")}
    assert len(roots) == 4


def test_options_that_look_alike_have_keys_of_their_own():
    lookalikes = [None, "", [], {}, 0, False, "0", [0], [None], {"": None}, "None", 0.5, [[]], {"b": {}}]
    lookalikes += [{"b.c": 1}, {"b": {"c": 1}}, ["b", "c"], [["b"], "c"], "bc", 1, True, "true", 1.5]
    keys = [_key(processor_options={"a": value}) for value in lookalikes]
    assert len(set(keys)) == len(keys)
    assert _key(processor_options={}) not in keys


def test_every_derived_key_has_256_bits():
    features = [make_feature("cat", 0, 4)]
    chain = PrefixChain(prefix_root("m", "s"), [1] * 8, [], features, 4)
    assert {len(digest) for digest in chain.digests(2)} == {32}
    assert len(prefix_root("m", "s")) == 32
    assert re.fullmatch("[0-9a-f]{64}", _key())


def test_a_tenants_digest_does_not_show_its_name_and_is_empty_without_one():
    assert tenant_digest("") == ""
    assert re.fullmatch("[0-9a-f]{16}", tenant_digest("alice"))
    assert len({tenant_digest(name) for name in ("alice", "bob", "alice ")}) == 3

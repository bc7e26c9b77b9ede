"""Bytes of the registry and of the scaling board: those of earlier releases are read, and written."""

from __future__ import annotations

import sys
from dataclasses import replace

import msgpack
import pytest

from triptych.base.scaling import PoolDemand, ScalingDecision, ScalingRules
from triptych.base.types import WorkerInfo
from triptych.registry.registry import _pack, _unpack
from triptych.registry.scaling import (
    pack_decision,
    pack_demand,
    unpack_decision,
    unpack_demand,
    unpack_rules,
)

INFO = WorkerInfo(
    "10.0.0.1:5000", "pd", "i1", "k", "m", ("n",), {"plan_credit": 4, "big": 1 << 33}, "image", "p", "cpu"
)
#: As release 0.2.0 wrote it.
INFO_BYTES = (
    b"\x8a\xa7address\xad10.0.0.1:5000\xa4pool\xa2pd\xabincarnation\xa2i1\xa9model_key\xa1k\xa5model\xa1m"
    b"\xaanamespaces\x91\xa1n\xa8capacity\x82\xabplan_credit\x04\xa3big\xcf\x00\x00\x00\x02\x00\x00\x00\x00"
    b"\xa8modality\xa5image\xa5proof\xa1p\xa4kind\xa3cpu"
)
DEMAND = PoolDemand(1.5, 2, 0.0, 3, 4.5, None)
DEMAND_BYTES = b"\x96\xcb?\xf8" + bytes(6) + b"\x02\xcb" + bytes(8) + b"\x03\xcb@\x12" + bytes(6) + b"\xc0"


def test_a_registration_has_the_bytes_that_it_always_had() -> None:
    assert _pack(INFO) == INFO_BYTES
    assert _unpack(b"i1\n" + INFO_BYTES) == INFO


def test_a_registration_with_adapters_is_read_as_it_was_written() -> None:
    """Proxies of earlier releases leave such a worker out, as any with a field that they do not know."""
    named = replace(INFO, adapters={"sql": "a" * 64})
    assert _unpack(b"i1\n" + _pack(named)) == named
    assert msgpack.unpackb(_pack(named)).keys() - msgpack.unpackb(INFO_BYTES).keys() == {"adapters"}


def test_a_demand_and_a_decision_have_the_bytes_that_they_always_had() -> None:
    assert pack_demand(DEMAND) == DEMAND_BYTES
    assert unpack_demand(DEMAND_BYTES) == DEMAND
    assert pack_decision(ScalingDecision(3, "demand", True)) == b"\x93\x03\xa6demand\xc3"
    assert unpack_decision(b"\x93\x03\xa6demand\xc3") == ScalingDecision(3, "demand", True)


def test_rules_may_have_whole_numbers() -> None:
    assert unpack_rules(msgpack.packb([1, 8, 2, 0.7, 60, 0])) == ScalingRules(1, 8, 2.0, 0.7, 60.0, 0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"address": 7},
        {"address": b"10.0.0.1:5000"},
        {"namespaces": "n"},
        {"namespaces": [1]},
        {"capacity": {"plan_credit": "4"}},
        {"capacity": {"plan_credit": 1.5}},
        {"capacity": [4]},
        {"capacity": {1: 2}},
        {"kind": None},
        {"adapters": ["sql"]},
        {"adapters": {"sql": 1}},
        {"proof": msgpack.ExtType(5, b"x")},
        {"of_a_later_release": 1},
        {"model": None, "address": None},
    ],
    ids=str,
)
def test_a_registration_that_is_none_of_ours_is_logged_and_left_out(changes, caplog) -> None:
    fields = msgpack.unpackb(INFO_BYTES) | changes
    assert _unpack(b"i1\n" + msgpack.packb(fields)) is None
    assert "a registration of" in caplog.text and "cannot be read" in caplog.text


@pytest.mark.parametrize("raw", [b"", b"i1", b"i1\n", b"i1\n\xc1", b"i1\n" + b"\x91" * 100_000])
def test_a_registration_that_is_no_map_is_left_out(raw) -> None:
    assert _unpack(raw) is None


@pytest.mark.parametrize(
    "value",
    [
        [1.5, 2, 0.0, 3.0, 4.5],
        [1.5, 2, 0.0, 3.0, 4.5, None, 0],
        [-1.0, 2, 0.0, 3.0, 4.5, None],
        [float("nan"), 2, 0.0, 3.0, 4.5, None],
        [1.5, 2, 0.0, float("inf"), 4.5, None],
        [1.5, True, 0.0, 3.0, 4.5, None],
        [True, 2, 0.0, 3.0, 4.5, None],
        [1.5, -1, 0.0, 3.0, 4.5, None],
        [1.5, 2, 0.0, 3.0, 4.5, 1_000_000_001],
        {"backlog": 1.5},
    ],
    ids=str,
)
def test_a_demand_that_is_none_of_ours_is_none(value) -> None:
    assert unpack_demand(msgpack.packb(value)) is None


def test_a_demand_may_be_as_large_as_a_number() -> None:
    assert unpack_demand(msgpack.packb([sys.float_info.max, 1_000_000_000, 0, 0, 0, 0])) is not None


@pytest.mark.parametrize(
    "value",
    [[3, "x" * 41, True], [3, "demand", 1], [-1, "demand", True], [3, b"demand", True], [3, "demand"]],
)
def test_a_decision_that_is_none_of_ours_is_none(value) -> None:
    assert unpack_decision(msgpack.packb(value)) is None

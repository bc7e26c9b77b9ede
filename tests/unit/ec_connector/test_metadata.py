from __future__ import annotations

import dataclasses

import pytest

from support.data.items import make_plan
from triptych.ec_connector.metadata import Fetch, LoadId, TransferMetadata


def test_metadata_survives_msgpack() -> None:
    plan = dataclasses.replace(make_plan(), runs=((0, 3), (4, 4)), length=8)
    metadata = TransferMetadata(
        step=7,
        fetches=(Fetch(plan, 3), Fetch(make_plan("other"), 4)),
        moves=(LoadId(plan.mm_hash, 2),),
        drops=(LoadId(plan.mm_hash, 1),),
    )
    assert TransferMetadata.from_bytes(metadata.to_bytes()) == metadata


def test_two_metadata_share_no_state() -> None:
    one, two = TransferMetadata(1), TransferMetadata(2)
    assert one.fetches == two.fetches == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.step = 3  # type: ignore[misc]


def test_metadata_of_another_layout_is_refused() -> None:
    with pytest.raises(ValueError):
        TransferMetadata.from_bytes(b"\x95\x09\x01\x90\x90\x90")

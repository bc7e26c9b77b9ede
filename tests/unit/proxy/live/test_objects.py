"""The committed example of the live data, which the page's and the terminal's tests use too."""

from __future__ import annotations

import msgspec
import pytest

from support.fakes.live_view import EXAMPLE
from triptych.proxy.live.objects import ClusterHistory, ClusterSnapshot, Waterfall


@pytest.mark.parametrize(
    ("name", "kind"), [("snapshot", ClusterSnapshot), ("history", ClusterHistory), ("record", Waterfall)]
)
def test_the_example_has_all_fields_and_no_others(name: str, kind: type[msgspec.Struct]) -> None:
    read = msgspec.convert(EXAMPLE[name], kind)
    assert msgspec.to_builtins(read) == EXAMPLE[name]

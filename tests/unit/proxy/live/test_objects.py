"""Live data as JSON: the committed example, which the page's and the terminal's tests use too, and names."""

from __future__ import annotations

import msgspec
import pytest

from support.fakes.live_view import EXAMPLE
from triptych.proxy.live.objects import ClusterHistory, ClusterSnapshot, Waterfall, draw_row


@pytest.mark.parametrize(
    ("name", "kind"), [("snapshot", ClusterSnapshot), ("history", ClusterHistory), ("record", Waterfall)]
)
def test_the_example_has_all_fields_and_no_others(name: str, kind: type[msgspec.Struct]) -> None:
    read = msgspec.convert(EXAMPLE[name], kind)
    assert msgspec.to_builtins(read) == EXAMPLE[name]


def test_rows_have_names_of_their_own() -> None:
    names = {draw_row() for _ in range(100)}
    assert len(names) == 100
    assert {len(name) for name in names} == {8}

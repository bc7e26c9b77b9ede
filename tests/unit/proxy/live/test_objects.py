"""Live data as JSON: the committed example, which the page's and the terminal's tests use too, and names."""

from __future__ import annotations

import msgspec
import pytest

from support.fakes.live_view import EXAMPLE
from triptych.proxy.live.objects import ClusterHistory, ClusterSnapshot, Waterfall, draw_row, short_address


@pytest.mark.parametrize(
    ("name", "kind"), [("snapshot", ClusterSnapshot), ("history", ClusterHistory), ("record", Waterfall)]
)
def test_the_example_has_all_fields_and_no_others(name: str, kind: type[msgspec.Struct]) -> None:
    read = msgspec.convert(EXAMPLE[name], kind)
    assert msgspec.to_builtins(read) == EXAMPLE[name]


@pytest.mark.parametrize(
    ("address", "short"),
    [
        ("127.0.0.1:41001", "127.0.0.1:41001"),
        ("pd-1.pd.default.svc.cluster.local:9000", "pd-1:9000"),
        ("worker:9000", "worker:9000"),
        ("[fd00::1]:9000", "[fd00::1]:9000"),
        ("unix:/run/triptych/encoder-0.sock", "encoder-0.sock"),
        ("proxy", "proxy"),
        ("", ""),
    ],
)
def test_an_address_is_short_and_tells_workers_apart(address: str, short: str) -> None:
    assert short_address(address) == short


def test_a_short_address_has_a_longest_length() -> None:
    assert len(short_address("x" * 500)) <= 32
    assert len(short_address("/" + "x" * 500)) <= 32
    assert len(short_address("x" * 500 + ".example:1")) <= 40


def test_rows_have_names_of_their_own() -> None:
    names = {draw_row() for _ in range(100)}
    assert len(names) == 100
    assert {len(name) for name in names} == {8}

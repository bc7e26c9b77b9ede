"""The committed example of the live data, which the page's and the terminal's tests use too."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from triptych.proxy.live.objects import ClusterHistory, ClusterSnapshot, Waterfall

EXAMPLE = json.loads(Path(__file__).with_name("example_cluster.json").read_text())


@pytest.mark.parametrize(
    ("name", "kind"), [("snapshot", ClusterSnapshot), ("history", ClusterHistory), ("record", Waterfall)]
)
def test_the_example_has_all_fields_and_no_others(name: str, kind: type[msgspec.Struct]) -> None:
    read = msgspec.convert(EXAMPLE[name], kind)
    assert msgspec.to_builtins(read) == EXAMPLE[name]

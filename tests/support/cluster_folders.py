"""The folders whose tests share clusters, which end with the last of these tests and not with the run."""

from __future__ import annotations

from typing import Any

import pytest

CLUSTER_FOLDERS = ("chaos", "e2e", "fuzz", "security")

#: What the tests of the folder share, in the order in which it was set up.
_shared: list[tuple[pytest.FixtureDef[Any], Any]] = []


def folder_of(nodeid: str) -> str:
    """The folder below tests/, "" for what is in none."""
    return f"{nodeid.partition('::')[0]}/".split("/")[1]


def note_fixture(fixture: pytest.FixtureDef[Any], request: Any) -> None:
    """Called before a fixture is set up."""
    if fixture.scope == "session" and folder_of(fixture.baseid) in CLUSTER_FOLDERS:
        _shared.append((fixture, request))


def end_clusters(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends what the folder's tests share, where `item` is the last of them."""
    if nextitem is not None and folder_of(nextitem.nodeid) != folder_of(item.nodeid):
        while _shared:
            fixture, request = _shared.pop()
            fixture.finish(request)

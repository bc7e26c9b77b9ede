"""The folders whose tests share clusters, which end with the last of these tests and not with the run.

A plugin of its own: pytest asks the hooks of a conftest.py below the root for no fixture of a session.
"""

from __future__ import annotations

from typing import Any

import pytest

CLUSTER_FOLDERS = ("browser", "chaos", "e2e", "fuzz", "security")

#: What the tests of the folder share, in the order in which it was set up.
_shared: list[tuple[pytest.FixtureDef[Any], Any]] = []


def folder_of(nodeid: str) -> str:
    """The folder below tests/, "" for what is in none."""
    return f"{nodeid.partition('::')[0]}/".split("/")[1]


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: Any) -> None:
    if fixturedef.scope == "session" and folder_of(fixturedef.baseid) in CLUSTER_FOLDERS:
        _shared.append((fixturedef, request))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends what the folder's tests share, where `item` is the last of them."""
    if nextitem is not None and folder_of(nextitem.nodeid) != folder_of(item.nodeid):
        while _shared:
            fixture, request = _shared.pop()
            fixture.finish(request)

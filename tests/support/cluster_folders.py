"""The folders whose tests share clusters, which end with the last of these tests and not with the run."""

from __future__ import annotations

import pytest

CLUSTER_FOLDERS = ("chaos", "e2e", "fuzz", "security")


def folder_of(nodeid: str) -> str:
    """The folder below tests/."""
    return nodeid.partition("::")[0].split("/")[1]


def end_clusters(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ends what the folder's tests share, where `item` is the last of them."""
    folder = folder_of(item.nodeid)
    if nextitem is None or folder not in CLUSTER_FOLDERS or folder_of(nextitem.nodeid) == folder:
        return
    for fixtures in item.session._fixturemanager._arg2fixturedefs.values():
        for fixture in fixtures:
            if fixture.baseid.startswith(f"tests/{folder}"):
                fixture.finish(item._request)  # type: ignore[attr-defined]

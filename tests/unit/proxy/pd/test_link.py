"""A link to a PD worker: whose requests are lost when another process answers."""

from __future__ import annotations

from typing import Any

import pytest

from triptych.proxy.pd import link as module


@pytest.mark.parametrize(("found", "lost"), [("one", []), ("two", [True]), ("", [])])
async def test_another_process_at_the_address_has_none_of_the_requests(
    monkeypatch, found: str, lost: list[bool]
):
    told = list[bool]()

    async def incarnation(call: object) -> str:
        return found

    monkeypatch.setattr(module, "_incarnation", incarnation)
    monkeypatch.setattr(module.PDLink, "_lose_all", lambda self, *, final: told.append(final))
    link: Any = object.__new__(module.PDLink)
    link._incarnation, link._left = "one", True
    await link._identify(None)
    assert told == lost
    assert (link._incarnation, link._left) == (found or "one", False)

"""The blocking client is what the one for asyncio gives: a change of one is a change of both."""

from __future__ import annotations

import importlib.util
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools/sync_client.py"


def test_the_blocking_client_is_made_from_the_one_for_asyncio() -> None:
    spec = importlib.util.spec_from_file_location("sync_client", TOOL)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.main(["--check"]) == ""

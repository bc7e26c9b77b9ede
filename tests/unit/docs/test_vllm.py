"""docs/vllm.md names every option of the connector."""

from __future__ import annotations

from pathlib import Path

from triptych.integrations.vllm.options import _NAMES

PAGE = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text()


def test_every_option_is_on_the_page():
    assert [name for name in _NAMES if f"`{name}`" not in PAGE] == []

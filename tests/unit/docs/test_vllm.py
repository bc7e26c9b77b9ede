"""docs/vllm.md names every option of the connector, and the store's user with what it needs."""

from __future__ import annotations

from pathlib import Path

from triptych.ec_connector.access.acl import rules
from triptych.ec_connector.access.uses import VLLM, granted
from triptych.integrations.vllm.options import _NAMES

PAGE = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text()


def test_every_option_is_on_the_page():
    assert [name for name in _NAMES if f"`{name}`" not in PAGE] == []


def test_the_users_rules_are_those_that_the_connector_needs():
    assert f"ACL SETUSER triptych-vllm reset on >PASSWORD {' '.join(rules(granted(VLLM)))}\n" in PAGE

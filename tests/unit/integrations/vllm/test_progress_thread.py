"""NIXL's progress thread: whose agents wait for events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from triptych.integrations.vllm.progress_thread import CONNECTORS, PAUSE, let_wait, makes_agents


def transfers_by(*connectors: str) -> Any:
    """vLLM's configuration of KV transfers with these connectors."""
    return SimpleNamespace(has_connector=lambda name: name in connectors)


@pytest.mark.parametrize("connector", CONNECTORS)
def test_each_of_vllms_connectors_over_nixl_makes_agents(connector):
    assert makes_agents(transfers_by("OffloadingConnector", connector))


@pytest.mark.parametrize("config", [None, transfers_by("OffloadingConnector")])
def test_no_transfers_and_others_make_none(config):
    assert not makes_agents(config)


def test_agents_that_are_made_later_pause_in_place_of_what_nixls_python_class_says():
    made: list[tuple[str, Any]] = []
    bindings = SimpleNamespace(nixlAgent=lambda name, config: made.append((name, config)) or len(made))
    let_wait(bindings)
    config = SimpleNamespace(useProgThread=True, pthrDelay=0)
    assert bindings.nixlAgent("decode", config) == 1
    assert made == [("decode", config)]
    assert config.pthrDelay == PAUSE and config.useProgThread


def test_a_second_connector_of_the_process_changes_nothing_more():
    bindings = SimpleNamespace(nixlAgent=lambda name, config: name)
    let_wait(bindings)
    once = bindings.nixlAgent
    let_wait(bindings)
    assert bindings.nixlAgent is once

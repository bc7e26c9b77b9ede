from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from support.items import make_plan
from triptych.ec_connector import mixin
from triptych.ec_connector.base import ECTransferConfig, EncoderOutput
from triptych.ec_connector.memory_connector import memory_store
from triptych.ec_connector.metadata import Fetch, HostCopy, TransferMetadata
from triptych.ec_connector.mixin import ECConnectorModelRunnerMixin as Runner

CONFIG = ECTransferConfig(connector="memory", store_url="memory://mixin")


@pytest.fixture(autouse=True)
def no_agent_before_or_after() -> Iterator[None]:
    memory_store(CONFIG.store_url).clear()
    yield
    mixin.shutdown_ec_transfer()


def entry() -> EncoderOutput:
    plan = make_plan()
    return EncoderOutput(plan, torch.ones(plan.rows, plan.width))


def test_without_a_config_there_is_no_agent() -> None:
    mixin.ensure_ec_transfer_initialized(None)
    assert not mixin.is_ec_transfer_instance()
    with pytest.raises(RuntimeError, match="not initialized"):
        mixin.get_ec_transfer()


def test_there_is_one_agent_and_after_a_shutdown_another() -> None:
    mixin.ensure_ec_transfer_initialized(CONFIG)
    first = mixin.get_ec_transfer()
    mixin.ensure_ec_transfer_initialized(CONFIG)
    assert mixin.get_ec_transfer() is first
    mixin.shutdown_ec_transfer()
    mixin.shutdown_ec_transfer()
    assert not mixin.is_ec_transfer_instance()
    mixin.ensure_ec_transfer_initialized(CONFIG)
    assert mixin.get_ec_transfer() is not first


def test_without_an_agent_both_calls_do_nothing() -> None:
    Runner.maybe_save_ec_to_connector({}, "absent")
    with Runner.maybe_get_ec_connector_output(SimpleNamespace(), {}) as output:
        assert output is None


def test_saves_and_loads_go_through_the_agent_and_loads_come_before_the_body() -> None:
    mixin.ensure_ec_transfer_initialized(CONFIG)
    item = entry()
    key = item.plan.mm_hash
    Runner.maybe_save_ec_to_connector({key: item}, key)
    cache: dict[str, EncoderOutput] = {}
    orders = TransferMetadata(1, fetches=(Fetch(item.plan, 1),), moves=(HostCopy(key, 1),))
    step = SimpleNamespace(ec_connector_metadata=orders)
    with Runner.maybe_get_ec_connector_output(step, cache) as output:
        assert mixin.get_ec_transfer().metadata is orders
        assert cache[key] is item
    assert output is not None
    assert (output.saved, list(output.fetched), output.loaded) == ([key], [key], [key])
    assert mixin.get_ec_transfer().metadata is None


def test_the_metadata_is_cleared_when_the_body_raises() -> None:
    mixin.ensure_ec_transfer_initialized(CONFIG)
    step = SimpleNamespace(ec_connector_metadata=TransferMetadata(1))
    with pytest.raises(KeyError), Runner.maybe_get_ec_connector_output(step, {}):
        raise KeyError
    assert mixin.get_ec_transfer().metadata is None

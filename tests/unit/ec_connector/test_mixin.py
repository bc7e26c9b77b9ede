from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from support.data.items import make_plan
from triptych.ec_connector.base import ECConnectorRole, ECTransferConfig, EncoderOutput
from triptych.ec_connector.connectors.memory_store import MemoryStore
from triptych.ec_connector.metadata import Fetch, LoadId, TransferMetadata
from triptych.ec_connector.mixin import ECConnectorModelRunnerMixin as Runner

WORKER = ECConnectorRole.WORKER


@pytest.fixture
def config() -> ECTransferConfig:
    return ECTransferConfig(connector="memory", store=MemoryStore())


@pytest.fixture
def runner() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.shutdown_ec_transfer()


def entry() -> EncoderOutput:
    plan = make_plan()
    return EncoderOutput(plan, torch.ones(plan.rows, plan.width))


def test_before_it_is_initialized_a_runner_has_no_connector(runner: Runner) -> None:
    assert not runner.is_ec_transfer_instance()
    with pytest.raises(RuntimeError, match="not initialized"):
        runner.get_ec_transfer()


def test_a_runner_has_one_connector_and_after_a_shutdown_another(
    runner: Runner, config: ECTransferConfig
) -> None:
    first = runner.ensure_ec_transfer_initialized(config, WORKER)
    assert first.role is WORKER
    assert runner.ensure_ec_transfer_initialized(config, WORKER) is first is runner.get_ec_transfer()
    runner.shutdown_ec_transfer()
    runner.shutdown_ec_transfer()
    assert not runner.is_ec_transfer_instance()
    assert runner.ensure_ec_transfer_initialized(config, WORKER) is not first


def test_two_runners_of_one_process_have_connectors_of_their_own(
    runner: Runner, config: ECTransferConfig
) -> None:
    other = Runner()
    first = runner.ensure_ec_transfer_initialized(config, WORKER)
    assert other.ensure_ec_transfer_initialized(config, WORKER) is not first
    other.shutdown_ec_transfer()
    assert runner.get_ec_transfer() is first


def test_without_a_connector_both_calls_do_nothing(runner: Runner) -> None:
    runner.maybe_save_ec_to_connector({}, "absent")
    with runner.maybe_get_ec_connector_output(SimpleNamespace(ec_connector_metadata=None), {}) as output:
        assert output is None


def test_saves_and_loads_go_through_the_connector_and_loads_come_before_the_body(
    runner: Runner, config: ECTransferConfig
) -> None:
    runner.ensure_ec_transfer_initialized(config, WORKER)
    item = entry()
    key = item.plan.mm_hash
    runner.maybe_save_ec_to_connector({key: item}, key)
    cache: dict[str, EncoderOutput] = {}
    orders = TransferMetadata(1, fetches=(Fetch(item.plan, 1),), moves=(LoadId(key, 1),))
    step = SimpleNamespace(ec_connector_metadata=orders)
    with runner.maybe_get_ec_connector_output(step, cache) as output:
        assert runner.get_ec_transfer().metadata is orders
        assert cache[key] is item
    assert output is not None
    assert (output.saved, list(output.fetched), output.loaded) == ([key], [key], [key])
    assert runner.get_ec_transfer().metadata is None


def test_the_metadata_is_cleared_when_the_body_raises(runner: Runner, config: ECTransferConfig) -> None:
    runner.ensure_ec_transfer_initialized(config, WORKER)
    step = SimpleNamespace(ec_connector_metadata=TransferMetadata(1))
    with pytest.raises(KeyError), runner.maybe_get_ec_connector_output(step, {}):
        raise KeyError
    assert runner.get_ec_transfer().metadata is None


def test_transfers_that_cannot_be_started_fail_their_loads_and_not_the_step(
    runner: Runner, config: ECTransferConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = runner.ensure_ec_transfer_initialized(config, WORKER)
    item = entry()
    key = item.plan.mm_hash
    orders = TransferMetadata(1, fetches=(Fetch(item.plan, 7),))

    def broken(*_: object) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(connector, "start_load_caches", broken)
        with runner.maybe_get_ec_connector_output(
            SimpleNamespace(ec_connector_metadata=orders), {}
        ) as output:
            pass
    assert output is not None
    assert [failure.mm_hash for failure in output.failed] == [key]
    assert output.generations == {key: 7}

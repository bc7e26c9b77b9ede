"""The factory of connectors, their metadata, and the runner's mixin."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from support.data.items import make_plan
from triptych.base.types import EmbeddingSource
from triptych.ec_connector.base import ECConnectorRole, ECTransferConfig, EncoderOutput
from triptych.ec_connector.connectors.memory import (
    MemoryConnectorScheduler,
    MemoryConnectorWorker,
    MemoryStore,
)
from triptych.ec_connector.factory import ECConnectorFactory
from triptych.ec_connector.metadata import Fetch, LoadId, TransferMetadata
from triptych.ec_connector.mixin import ECConnectorModelRunnerMixin as Runner


def test_roles_have_the_numbers_that_peers_use() -> None:
    assert (ECConnectorRole.SCHEDULER, ECConnectorRole.WORKER) == (0, 1)


def test_a_registered_name_makes_both_roles() -> None:
    config = ECTransferConfig(connector="memory", store=MemoryStore())
    scheduler = ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER)
    worker = ECConnectorFactory.create_connector(config, ECConnectorRole.WORKER)
    assert isinstance(scheduler, MemoryConnectorScheduler)
    assert isinstance(worker, MemoryConnectorWorker)
    assert (scheduler.role, worker.role) == (ECConnectorRole.SCHEDULER, ECConnectorRole.WORKER)
    assert scheduler.config is worker.config is config
    assert scheduler.metadata is worker.metadata is None


def test_a_module_path_makes_a_connector_too() -> None:
    config = ECTransferConfig(connector="triptych.ec_connector.connectors.memory:MemoryConnector")
    made = ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER)
    assert isinstance(made, MemoryConnectorScheduler)


@pytest.mark.parametrize("name", ["nixl", "no.such.module:Thing", "triptych.base.types:Nothing"])
def test_an_unknown_connector_is_a_value_error(name: str) -> None:
    with pytest.raises(ValueError, match="connector"):
        ECConnectorFactory.create_connector(ECTransferConfig(connector=name), ECConnectorRole.WORKER)


def test_the_memory_connector_has_no_store_of_its_own() -> None:
    with pytest.raises(ValueError, match="needs a store"):
        ECConnectorFactory.create_connector(ECTransferConfig(connector="memory"), ECConnectorRole.WORKER)


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="already"):
        ECConnectorFactory.register("redis", "somewhere.else:Thing")


def test_importing_factory_and_store_imports_no_torch() -> None:
    code = (
        "import sys, triptych.ec_connector.factory, triptych.registry.registry, "
        "triptych.registry.leases, triptych.ec_connector.connectors.scheduler_role; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_metadata_survives_msgpack() -> None:
    plan = dataclasses.replace(make_plan(), runs=((0, 3), (4, 4)), length=8)
    metadata = TransferMetadata(
        step=7,
        fetches=(Fetch(plan, 3), Fetch(make_plan("other"), 4, EmbeddingSource("n", "s"))),
        moves=(LoadId(plan.mm_hash, 2),),
        drops=(LoadId(plan.mm_hash, 1),),
    )
    assert TransferMetadata.from_bytes(metadata.to_bytes()) == metadata


def test_two_metadata_share_no_state() -> None:
    one, two = TransferMetadata(1), TransferMetadata(2)
    assert one.fetches == two.fetches == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.step = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "raw",
    [b"\x95\x02\x01\x90\x90\x90", b"\x80", b"", b"\x81\xa4step\xa11"],
    ids=["of an earlier release", "no step", "empty", "a step in words"],
)
def test_bytes_that_are_no_metadata_are_refused(raw) -> None:
    with pytest.raises(ValueError):
        TransferMetadata.from_bytes(raw)


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


def test_a_runner_has_one_connector_and_after_a_shutdown_another(runner, config):
    first = runner.ensure_ec_transfer_initialized(config, WORKER)
    assert first.role is WORKER
    assert runner.ensure_ec_transfer_initialized(config, WORKER) is first is runner.get_ec_transfer()
    runner.shutdown_ec_transfer()
    runner.shutdown_ec_transfer()
    assert not runner.is_ec_transfer_instance()
    assert runner.ensure_ec_transfer_initialized(config, WORKER) is not first


def test_two_runners_of_one_process_have_connectors_of_their_own(runner, config):
    other = Runner()
    first = runner.ensure_ec_transfer_initialized(config, WORKER)
    assert other.ensure_ec_transfer_initialized(config, WORKER) is not first
    other.shutdown_ec_transfer()
    assert runner.get_ec_transfer() is first


def test_without_a_connector_both_calls_do_nothing(runner: Runner) -> None:
    runner.maybe_save_ec_to_connector({}, "absent")
    with runner.maybe_get_ec_connector_output(SimpleNamespace(ec_connector_metadata=None), {}) as output:
        assert output is None


def test_saves_and_loads_go_through_the_connector_and_loads_come_before_the_body(runner, config):
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
    assert (output.saved, list(output.fetched), output.loaded) == ([key], [key], [key])
    assert runner.get_ec_transfer().metadata is None


def test_the_metadata_is_cleared_when_the_body_raises(runner: Runner, config: ECTransferConfig) -> None:
    runner.ensure_ec_transfer_initialized(config, WORKER)
    step = SimpleNamespace(ec_connector_metadata=TransferMetadata(1))
    with pytest.raises(KeyError), runner.maybe_get_ec_connector_output(step, {}):
        raise KeyError
    assert runner.get_ec_transfer().metadata is None


def test_transfers_that_cannot_be_started_fail_their_loads_and_not_the_step(runner, config, monkeypatch):
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
    assert [failure.mm_hash for failure in output.failed] == [key]
    assert output.generations == {key: 7}
